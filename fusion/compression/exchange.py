"""One compressed exchange of a bucket: feedback, the compressor, and what is not a number.

Called by the executor on the cycle thread, and by nothing else: `hvd` operations and optimizers
get here through a request's codec.

A bucket that holds an infinity or a NaN is sent as NaN, whatever the method would make of it: every
rank then sees that the step is worthless, as it would uncompressed (a `GradScaler` skips it), and
what is remembered stays as it was instead of being spoilt for good.
"""

from __future__ import annotations

from hashlib import blake2b

import torch

from fusion.compression.base import BucketInfo, Compressor, Key, Transport
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


def is_finite(values: torch.Tensor) -> bool:
    """Whether no element is an infinity or a NaN; one pass, nothing allocated."""
    least, most = torch.aminmax(values)
    return bool(torch.isfinite(least) & torch.isfinite(most))
