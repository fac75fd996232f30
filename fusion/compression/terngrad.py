"""`terngrad`: each element becomes -1, 0 or 1 times a scale of its tensor, at random.

The scale is the largest magnitude in the tensor, after elements beyond `clip` standard
deviations of it were cut; an element keeps its sign with probability magnitude / scale and is
zero otherwise, so the method is unbiased but for the cut. Five elements share a byte
(3^5 = 243): ratio 20×, less 4 bytes a tensor. Not linear: payloads are gathered.
Cost: three passes and a random number an element to encode, two passes to decode each
rank's payload.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import Any, ClassVar

import numpy as np
import torch

from fusion.compression.base import BucketInfo, Compressor, Key, Memory, padded, parts_of, payload_of

_TO_A_BYTE = 5


class TernGrad(Compressor, frozen=True):
    """See the module.

    Args:
        clip: standard deviations beyond which an element is cut; 0 cuts none, and is unbiased.
    """

    name: ClassVar[str] = "terngrad"
    paper: ClassVar[str] = "Wen et al. 2017, TernGrad, arXiv:1705.07878"
    unbiased: ClassVar[bool] = True

    clip: float = 2.5
    feedback: bool = False

    def __post_init__(self) -> None:
        clip: Any = self.clip
        if isinstance(clip, bool) or not isinstance(clip, (int, float)) or not 0 <= clip < 1e9:
            raise ValueError(f"terngrad: clip is a number of standard deviations from 0 on, not {clip!r}")

    def payload_bytes(self, info: BucketInfo) -> int:
        """A byte for five elements, a float32 for each tensor."""
        return padded(4 * len(info.pieces) + self._bytes(info))

    def encode(
        self, values: torch.Tensor, info: BucketInfo, key: Key, memories: Sequence[Memory] | None = None
    ) -> torch.Tensor:
        """Scales, then bytes."""
        generator = key.own()
        plane = self._bytes(info)
        digits = np.ones(plane * _TO_A_BYTE, dtype=np.uint8)
        scales = torch.zeros(len(info.pieces))
        for number, piece in enumerate(info.pieces):
            if piece.count:
                stop = piece.offset + piece.count
                scales[number] = self._ternarize(piece.of(values), generator, digits[piece.offset : stop])
        planes = digits.reshape(_TO_A_BYTE, plane)
        packed = planes[-1]
        for digit in planes[-2::-1]:
            packed = packed * np.uint8(3) + digit
        return payload_of(scales, torch.from_numpy(packed))

    def decode(self, payload: torch.Tensor, info: BucketInfo) -> torch.Tensor:
        """Digits times scales."""
        plane = self._bytes(info)
        scales, packed = parts_of(payload, (torch.float32, len(info.pieces)), (torch.uint8, plane))
        digits = np.empty((_TO_A_BYTE, plane), dtype=np.uint8)
        rest = packed.numpy()
        for digit in digits:
            quotient = rest // np.uint8(3)
            np.subtract(rest, quotient * np.uint8(3), out=digit)
            rest = quotient
        values = torch.from_numpy(digits).view(-1)[: info.count].to(torch.float32).sub_(1)
        for number, piece in enumerate(info.pieces):
            piece.of(values).mul_(scales[number])
        return values

    def _ternarize(self, values: torch.Tensor, generator: np.random.Generator, digits: np.ndarray) -> float:
        """Write 0, 1 or 2 for each element of a tensor; returns the scale."""
        if self.clip and len(values) > 1:
            bound = self.clip * float(values.std(correction=0))
            values = values.clamp(-bound, bound)
        magnitudes = values.abs()
        scale = float(magnitudes.amax())
        if scale == 0 or isnan(scale):
            return scale
        chance = torch.from_numpy(generator.random(len(values), dtype=np.float32)).mul_(scale)
        kept = (chance < magnitudes).numpy()
        positive = (values > 0).numpy()
        # 1 for zero, 2 for kept and positive, 0 for kept and negative.
        np.subtract(1 + (kept & positive).view(np.uint8), (kept & ~positive).view(np.uint8), out=digits)
        return scale

    def _bytes(self, info: BucketInfo) -> int:
        return -(-info.count // _TO_A_BYTE)
