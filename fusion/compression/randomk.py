"""`randomk`: elements that all ranks pick alike at random, so that only values travel.

Exactly `round(ratio × elements)` of them, at least one, every choice equally likely. Ratio
1 / ratio: 100× at 1 %. Linear: the indices follow from a seed that the ranks share, so the
values ride an all-reduce. With error feedback values are sent as they are; without it they are
multiplied by elements / count, which makes the method unbiased but noisy.
Cost: drawing and sorting the indices, and one pass to write the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from fusion.compression.base import (
    BucketInfo,
    Compressor,
    Key,
    Memory,
    Transport,
    check_ratio,
    padded,
    parts_of,
    payload_of,
    share,
)


class RandomK(Compressor, frozen=True):
    """See the module.

    Args:
        ratio: share of the elements that is sent, above 0 and at most 1.
    """

    name: ClassVar[str] = "randomk"
    paper: ClassVar[str] = (
        "Wangni et al. 2018, arXiv:1710.09854; with memory: Stich et al. 2018, arXiv:1809.07599"
    )
    linear: ClassVar[bool] = True
    unbiased: ClassVar[bool] = True

    ratio: float
    feedback: bool = True

    def __post_init__(self) -> None:
        check_ratio(self.ratio, self.name)

    def payload_bytes(self, info: BucketInfo) -> int:
        """A value for each element sent, and the seed."""
        return padded(8 + 4 * share(self.ratio, info.count))

    def encode(
        self, values: torch.Tensor, info: BucketInfo, key: Key, memories: Sequence[Memory] | None = None
    ) -> torch.Tensor:
        """The seed, then values; a receiver needs no more to find their places."""
        seed = torch.tensor([key.seed], dtype=torch.int64)
        return payload_of(seed, values[self._indices(info.count, key)])

    def add(self, payload: torch.Tensor, info: BucketInfo, total: torch.Tensor, sign: int = 1) -> None:
        """Values where the seed says."""
        seed, values = parts_of(payload, (torch.int64, 1), (torch.float32, share(self.ratio, info.count)))
        indices = self._indices(info.count, Key(int(seed)))
        total.index_add_(0, indices, values, alpha=sign * self._scale(info.count))

    def reduce(
        self,
        values: torch.Tensor,
        info: BucketInfo,
        key: Key,
        transport: Transport,
        memories: Sequence[Memory] | None = None,
        *,
        keep: bool = True,
    ) -> torch.Tensor:
        """See `Compressor.reduce`: one all-reduce of the values."""
        indices = self._indices(info.count, key)
        mean = transport.mean(values[indices])
        total = torch.zeros(info.count)
        total[indices] = mean.mul_(self._scale(info.count))
        if keep:
            values[indices] *= 1 - self._scale(info.count)
        return total

    def _indices(self, count: int, key: Key) -> torch.Tensor:
        """Ascending, so that memory is walked through in order."""
        picked = key.shared().choice(count, share(self.ratio, count), replace=False, shuffle=False)
        picked.sort()
        return torch.from_numpy(picked)

    def _scale(self, count: int) -> float:
        return 1.0 if self.feedback else count / share(self.ratio, count)
