"""`int8`: a byte for each element, and a scale for each block.

Ratio 4 / (1 + 4 / block), so 3.99× for blocks of 2048. Not linear: every rank has scales
of its own, so payloads are gathered; with more than 8 ranks a rank receives more bytes
than a dense ring would send. Cost: about two passes over the bucket to encode, and half a
pass more for random numbers; one pass to decode each rank's payload.

An element is off by at most half a step (`nearest`) or by less than one (`stochastic`), a
step being the largest magnitude of its block / 127. Stochastic rounding is unbiased: a value
between two steps becomes the upper one with a probability equal to how close it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
import torch

from fusion.compression.base import (
    BucketInfo,
    Compressor,
    Key,
    Memory,
    check_whole,
    padded,
    parts_of,
)

_LEVELS = 127.0
_AT_ONCE = 1 << 16
"""Elements worked on at a time, so that they stay in the core's cache."""


class Int8(Compressor, frozen=True):
    """See the module.

    Args:
        block: elements that share a scale, 8 to 65536.
        rounding: "stochastic" or "nearest".
    """

    name: ClassVar[str] = "int8"
    paper: ClassVar[str] = (
        "Alistarh et al. 2017, QSGD, arXiv:1610.02132; a scale a block: Dettmers et al. 2022, "
        "arXiv:2110.02861"
    )
    unbiased: ClassVar[bool] = True

    block: int = 2048
    rounding: str = "stochastic"
    feedback: bool = False

    def __post_init__(self) -> None:
        check_whole(self.block, 8, _AT_ONCE, "int8: block")
        if self.rounding not in ("stochastic", "nearest"):
            raise ValueError(f'int8: rounding must be "stochastic" or "nearest", not {self.rounding!r}')

    def payload_bytes(self, info: BucketInfo) -> int:
        """A byte for each element and a float32 for each block."""
        return padded(4 * self._blocks(info.count) + info.count)

    def encode(
        self, values: torch.Tensor, info: BucketInfo, key: Key, memories: Sequence[Memory] | None = None
    ) -> torch.Tensor:
        """Scales, then codes."""
        payload = torch.zeros(self.payload_bytes(info), dtype=torch.uint8)
        scales, codes = self.parts(payload, info)
        noise = key.own() if self.rounding == "stochastic" else None
        for rows, lo, hi in self._cuts(info.count):
            part = values[lo:hi].view(len(range(rows.start, rows.stop)), -1)
            scale = part.abs().amax(1).div_(_LEVELS)
            scales[rows] = scale
            steps = part / torch.where(scale == 0, 1.0, scale)[:, None]
            if noise is None:
                steps.round_()
            else:
                steps.add_(torch.from_numpy(noise.random(steps.shape, dtype=np.float32))).floor_()
            codes[lo:hi] = steps.clamp_(-_LEVELS, _LEVELS).view(-1)
        return payload

    def add(self, payload: torch.Tensor, info: BucketInfo, total: torch.Tensor, sign: int = 1) -> None:
        """Scale by scale, code by code."""
        scales, codes = self.parts(payload, info)
        for rows, lo, hi in self._cuts(info.count):
            many = rows.stop - rows.start
            part = codes[lo:hi].view(many, -1).to(torch.float32)
            total[lo:hi].view(many, -1).addcmul_(part, scales[rows][:, None], value=sign)

    def parts(self, payload: torch.Tensor, info: BucketInfo) -> list[torch.Tensor]:
        """The scales and the codes in a payload, as views."""
        return parts_of(payload, (torch.float32, self._blocks(info.count)), (torch.int8, info.count))

    def _blocks(self, count: int) -> int:
        return -(-count // self.block)

    def _cuts(self, count: int) -> Iterator[tuple[slice, int, int]]:
        """Blocks and elements of each piece of work; the last block may be short and is then alone."""
        whole = count // self.block
        step = max(1, _AT_ONCE // self.block)
        for row in range(0, whole, step):
            stop = min(row + step, whole)
            yield slice(row, stop), row * self.block, stop * self.block
        if whole * self.block < count:
            yield slice(whole, whole + 1), whole * self.block, count
