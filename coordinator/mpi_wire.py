"""The wire of a running job: negotiation over MPI, never in a blocking call.

Everything is posted and polled, so a rank that dies or fails while others wait
for it is noticed through `check` instead of hanging them (see `waiting.py`).
Needs MPI_THREAD_SERIALIZED if the program makes no MPI calls of its own, else
MPI_THREAD_MULTIPLE.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from coordinator.errors import RankLeftError
from coordinator.waiting import Waiter
from coordinator.wire import Words

T = TypeVar("T")

_EXCHANGE_TAG = 1
_FAILURE_TAG = 2


class MpiWire:
    """Implements `coordinator.wire.Wire` on a communicator of its own.

    Args:
        comm: duplicated here; collective.
        ranks: its members' ranks among all ranks, for messages; default their places.
    """

    def __init__(self, comm: MPI.Intracomm, ranks: Sequence[int] | None = None) -> None:
        self._comm = comm.Dup()
        self.rank: int = self._comm.rank
        self.size: int = self._comm.size
        self.ranks = range(self.size) if ranks is None else ranks
        self._waiter = Waiter(self.check)
        self._request: MPI.Request | None = None
        self._sent: Words = np.empty(0, dtype=np.uint64)
        self._received: Words = np.empty(0, dtype=np.uint64)
        self._failed: RankLeftError | None = None
        self._notices: list[MPI.Request] = []

    def start(self, words: Words) -> None:
        self._sent = words  # MPI reads it until the request is complete.
        if self.size == 1:
            self._received = words
            return
        if len(self._received) != len(words):
            self._received = np.empty_like(words)
        self._request = self._comm.Iallreduce(words, self._received, op=MPI.BAND)

    def test(self) -> bool:
        if self._request is None or self._request.Test():
            self._request = None
            return True
        return False

    def result(self) -> Words:
        return self._received

    def exchange(self, mine: T, merge: Callable[[T, T], T]) -> T:
        """Binomial tree to rank 0 and back: 2 log2(size) messages deep.

        Rank r merges the subtree of r + 1, then of r + 2, r + 4, ..., so lower ranks are always on the left.
        """
        distance = 1
        while distance < self.size and not self.rank & distance:
            if self.rank + distance < self.size:
                mine = merge(mine, self._receive(self.rank + distance))
            distance *= 2
        if self.rank:
            parent = self.rank & (self.rank - 1)
            self._send(mine, parent)
            mine = self._receive(parent)
        while distance > 1:
            distance //= 2
            if self.rank + distance < self.size:
                self._send(mine, self.rank + distance)
        return mine

    def announce(self, reason: str) -> None:
        payload = pickle.dumps(reason)
        for other in range(self.size):
            if other != self.rank:
                self._notices.append(self._comm.isend(payload, dest=other, tag=_FAILURE_TAG))

    def check(self) -> None:
        if self._failed is None and self.size > 1:
            status = MPI.Status()
            if self._comm.Iprobe(MPI.ANY_SOURCE, _FAILURE_TAG, status):
                reason = pickle.loads(self._comm.recv(source=status.source, tag=_FAILURE_TAG))
                self._failed = RankLeftError(f"rank {self.ranks[status.source]} failed: {reason}")
        if self._failed is not None:
            raise self._failed

    def close(self) -> None:
        self._comm.Free()

    def _send(self, value: object, to: int) -> None:
        request = self._comm.isend(value, dest=to, tag=_EXCHANGE_TAG)
        self._waiter.until(lambda: request.test()[0])

    def _receive(self, source: int) -> Any:
        self._waiter.until(lambda: self._comm.Iprobe(source, _EXCHANGE_TAG))
        return self._comm.recv(source=source, tag=_EXCHANGE_TAG)
