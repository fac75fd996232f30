"""`onebit`: the sign of each element, and the mean magnitude of each block.

Ratio 32 / (1 + 32 / block), so 31.5× for blocks of 2048. Not linear: payloads are gathered.
Needs error feedback: without it, small elements of either sign count as much as large ones.
The scale is the L1 mean, which keeps this a contraction, as error feedback requires, whatever
the distribution; the root mean square would not on sparse gradients. Zero counts as positive.
Cost: two passes over the bucket to encode, two to decode each rank's payload.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    payload_of,
)


class OneBit(Compressor, frozen=True):
    """See the module.

    Args:
        block: elements that share a scale, a multiple of 8.
    """

    name: ClassVar[str] = "onebit"
    paper: ClassVar[str] = (
        "Seide et al. 2014, 1-bit SGD, Interspeech; scaled sign with feedback: Karimireddy et al. 2019, "
        "arXiv:1901.09847"
    )

    block: int = 2048
    feedback: bool = True

    def __post_init__(self) -> None:
        check_whole(self.block, 8, 1 << 20, "onebit: block")
        if self.block % 8:
            raise ValueError(f"onebit: block must be a multiple of 8, not {self.block}")

    def payload_bytes(self, info: BucketInfo) -> int:
        """A bit for each element and a float32 for each block."""
        return padded(4 * self._blocks(info.count) + -(-info.count // 8))

    def encode(
        self, values: torch.Tensor, info: BucketInfo, key: Key, memories: Sequence[Memory] | None = None
    ) -> torch.Tensor:
        """Scales, then signs."""
        magnitudes = values.abs()
        whole = len(values) // self.block * self.block
        means = [magnitudes[:whole].view(-1, self.block).mean(1)]
        if whole < len(values):
            means.append(magnitudes[whole:].mean()[None])
        signs = np.packbits((values >= 0).numpy(), bitorder="little")
        return payload_of(torch.cat(means), torch.from_numpy(signs))

    def add(self, payload: torch.Tensor, info: BucketInfo, total: torch.Tensor, sign: int = 1) -> None:
        """Plus or minus the scale."""
        count = info.count
        scales, packed = self.parts(payload, info)
        whole = count // self.block * self.block
        step = max(self.block, (1 << 16) // self.block * self.block)
        for lo in range(0, count, step):
            hi = min(lo + step, count)
            bits = np.unpackbits(packed[lo // 8 : -(-hi // 8)].numpy(), count=hi - lo, bitorder="little")
            signs = torch.from_numpy(bits).to(torch.float32).mul_(2).sub_(1)
            full = max(0, min(hi, whole) - lo)
            rows = scales[lo // self.block : (lo + full) // self.block, None]
            target = total[lo : lo + full].view(-1, self.block)
            target.addcmul_(signs[:full].view(-1, self.block), rows, value=sign)
            if lo + full < hi:
                total[lo + full : hi].add_(signs[full:] * scales[-1], alpha=sign)

    def parts(self, payload: torch.Tensor, info: BucketInfo) -> list[torch.Tensor]:
        """The scales and the bytes of signs in a payload, as views."""
        signs = (torch.uint8, -(-info.count // 8))
        return parts_of(payload, (torch.float32, self._blocks(info.count)), signs)

    def _blocks(self, count: int) -> int:
        return -(-count // self.block)
