"""`topk`: the elements of largest magnitude in the bucket, with their indices.

Exactly `round(ratio × elements)` of them, at least one; of equal magnitudes the lower index
goes first. Ratio 1 / (2 × ratio): 50× at 1 %, 500× at 0.1 %. Not linear: payloads are
gathered, so a rank receives (ranks - 1) × 8 bytes an element sent, and it stops paying when
the share sent times the number of ranks nears one. Needs error feedback.

Cost: three passes over the bucket. The k-th magnitude is found among the few elements above
a bound that a sample of the bucket suggests; if the bound was too high, in the whole bucket.
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
    check_ratio,
    padded,
    parts_of,
    payload_of,
    share,
)

_SAMPLE = 1 << 16


class TopK(Compressor, frozen=True):
    """See the module.

    Args:
        ratio: share of the elements that is sent, above 0 and at most 1.
    """

    name: ClassVar[str] = "topk"
    paper: ClassVar[str] = (
        "Aji and Heafield 2017, arXiv:1704.05021; with memory: Stich et al. 2018, arXiv:1809.07599"
    )

    ratio: float
    feedback: bool = True

    def __post_init__(self) -> None:
        check_ratio(self.ratio, self.name)

    def payload_bytes(self, info: BucketInfo) -> int:
        """An index and a value for each element sent."""
        return padded(8 * share(self.ratio, info.count))

    def encode(
        self, values: torch.Tensor, info: BucketInfo, key: Key, memories: Sequence[Memory] | None = None
    ) -> torch.Tensor:
        """Values in the order of their indices, then indices, ascending."""
        self.check(info)
        indices = largest(values, share(self.ratio, info.count))
        return payload_of(values[indices], indices.to(torch.int32))

    def add(self, payload: torch.Tensor, info: BucketInfo, total: torch.Tensor, sign: int = 1) -> None:
        """Values where their indices say."""
        values, indices = self.parts(payload, info)
        total.index_add_(0, indices.to(torch.int64), values, alpha=sign)

    def parts(self, payload: torch.Tensor, info: BucketInfo) -> list[torch.Tensor]:
        """The values and the indices in a payload, as views."""
        count = share(self.ratio, info.count)
        return parts_of(payload, (torch.float32, count), (torch.int32, count))

    def check(self, info: BucketInfo) -> None:
        """Refuse what indices cannot tell apart.

        Raises:
            ValueError: the bucket is too large.
        """
        if info.count >= 1 << 31:
            raise ValueError(f"topk: a bucket of {info.count} elements is too large for 32-bit indices")


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` largest magnitudes, ascending; of equal ones the lower indices."""
    if count >= len(values):
        return torch.arange(len(values))
    magnitudes = values.abs()
    candidates = _candidates(magnitudes, count)
    among = magnitudes if candidates is None else magnitudes[candidates]
    least = torch.topk(among, count, sorted=False).values.min()
    if least.isnan():
        return torch.arange(count)
    chosen = among > least
    missing = count - int(chosen.sum())
    chosen[_where(among == least)[:missing]] = True
    where = _where(chosen)
    return where if candidates is None else candidates[where]


def _candidates(magnitudes: torch.Tensor, count: int) -> torch.Tensor | None:
    """Indices, ascending, that certainly include those of the `count` largest; None for all."""
    stride = len(magnitudes) // _SAMPLE
    if stride < 2:
        return None
    sample = magnitudes[::stride]
    # A few standard deviations more than the share that is wanted, to be rarely too few.
    wanted = len(sample) * count / len(magnitudes)
    rank = int(wanted + 4 * wanted**0.5 + 8)
    if rank >= len(sample) // 2:
        return None
    bound = torch.topk(sample, rank, sorted=False).values.min()
    found = _where(magnitudes >= bound if bound > 0 else magnitudes > 0)
    return found if len(found) >= count else None


def _where(mask: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.flatnonzero(mask.numpy()))  # A third of the time of torch's nonzero.
