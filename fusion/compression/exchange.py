"""One compressed exchange of a bucket: feedback, the compressor, and what is not a number.

Called by the executors on the cycle thread, and by nothing else: `hvd` operations and optimizers
get here through a request's codec. `exchange` is for buckets in host memory, `exchange_unseen` for
those on a device, of which the host reads nothing: it would have to wait for it.

A bucket that holds an infinity or a NaN is sent as NaN, whatever the method would make of it: every
rank then sees that the step is worthless, as it would uncompressed (a `GradScaler` skips it), and
what is remembered stays as it was instead of being spoilt for good.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

import torch

from fusion.compression.base import BucketInfo, Compressor, Key, Memory, Transport
from fusion.compression.feedback import Ledger

_MOST_COUNTED = 1 << 16


class Seeds:
    """A seed for each time a bucket is sent, the same on all ranks that send the same buckets.

    A rank asks once for each exchange. Buckets that have not been sent for long are forgotten, by
    all ranks alike, and begin anew.
    """

    def __init__(self) -> None:
        self._sent: dict[str, int] = {}

    def next(self, name: str) -> int:
        """The seed of the next time this bucket is sent."""
        count = self._sent.pop(name, 0)
        self._sent[name] = count + 1
        if len(self._sent) > _MOST_COUNTED:
            del self._sent[next(iter(self._sent))]
        digest = blake2b(f"{count}:{name}".encode(), digest_size=7).digest()
        return int.from_bytes(digest, "little")


def exchange(
    compressor: Compressor,
    bucket: torch.Tensor,
    info: BucketInfo,
    key: Key,
    transport: Transport,
    *,
    ledger: Ledger | None = None,
) -> torch.Tensor:
    """The mean of the buckets of all ranks as they are decoded, flat float32, new.

    Args:
        compressor: the same on all ranks.
        bucket: this rank's, flat float32; overwritten, and kept by the ledger if it has one.
        info: what lies in it.
        key: its seed is the same on all ranks.
        transport: the other ranks.
        ledger: of the bucket; a rank may have none, and then has no feedback.
    """
    if not info.count:
        return bucket
    if ledger is not None:
        ledger.add_to(bucket)
    finite = is_finite(bucket)
    if not finite:
        bucket.fill_(float("nan"))
    memories = None if ledger is None else ledger.memories
    keep = ledger is not None and ledger.feedback
    mean = compressor.reduce(bucket, info, key, transport, memories, keep=keep)
    if ledger is not None:
        ledger.stage(bucket)
        # The mean has the same bits on every rank, so all ranks decide alike.
        if not finite or not is_finite(mean):
            ledger.rollback()
        elif ledger.immediate:
            ledger.commit()
    return mean


class Reducing(Protocol):
    """What reduces a bucket on a device; some methods of `Compressor` can as they are."""

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
        """See `Compressor.reduce`."""
        ...


def exchange_unseen(
    reducing: Reducing,
    bucket: torch.Tensor,
    info: BucketInfo,
    key: Key,
    transport: Transport,
    *,
    ledger: Ledger | None = None,
) -> torch.Tensor:
    """Like `exchange`, of a bucket on a device, with the arguments of that.

    Whether all was finite is decided there. A rank that has a ledger commits what it staged as
    always, and the device leaves the residuals as they were if something was not.
    """
    if not info.count:
        return bucket
    if ledger is not None:
        ledger.add_to(bucket)
    finite = _finite(bucket)
    bucket.masked_fill_(~finite, float("nan"))
    keep = ledger is not None and ledger.feedback
    mean = reducing.reduce(bucket, info, key, transport, keep=keep)
    if ledger is not None:
        ledger.stage(bucket, finite & _finite(mean))
        if ledger.immediate:
            ledger.commit()
    return mean


def is_finite(values: torch.Tensor) -> bool:
    """Whether no element is an infinity or a NaN; one pass, nothing allocated."""
    return bool(_finite(values))


def _finite(values: torch.Tensor) -> torch.Tensor:
    least, most = torch.aminmax(values)
    return torch.isfinite(least) & torch.isfinite(most)
