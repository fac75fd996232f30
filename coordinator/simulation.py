"""Many ranks in one process: the protocol without MPI, threads or tensors.

`Fabric` drives the `Negotiator`s of any number of ranks in lockstep and counts
what a network would carry. Tests and the protocol benchmark use it; a running
job does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from typing import TypeVar

import numpy as np

from coordinator.messages import OpKind, ReduceOp, Request
from coordinator.negotiation import Flag, Negotiator, Outcome
from coordinator.reports import Report, Resolution, merge

T = TypeVar("T")


class Fabric:
    """The negotiators of `size` simulated ranks.

    Attributes:
        ranks: one negotiator a rank.
        cycles: all-reduces so far.
        exchanges: tree reductions of reports so far.
    """

    def __init__(self, size: int, capacity: int = 4096) -> None:
        self.ranks = [Negotiator(rank, size, capacity) for rank in range(size)]
        self.now = 0.0
        self.cycles = 0
        self.exchanges = 0
        self.failed: list[dict[str, str]] = [{} for _ in range(size)]
        self._leaving: dict[int, str] = {}
        self.departed: dict[int, str] | None = None

    def submit(self, rank: int, request: Request) -> None:
        """A rank submits a request; one that fails at once is in `failed[rank]`."""
        reason = self.ranks[rank].submit(request, self.now)
        if reason is not None:
            self.failed[rank][request.name] = reason

    def leave(self, rank: int, reason: str) -> None:
        """A rank shuts down in the next cycle."""
        self.ranks[rank].forget_all()
        self._leaving[rank] = reason

    def cycle(self, flags: dict[int, Flag] | None = None) -> list[Request]:
        """One cycle of all ranks; returns what became ready, in the agreed order.

        Raises:
            AssertionError: the ranks did not all decide the same.
        """
        self.now += 1.0
        self.cycles += 1
        flags = flags or {}
        leave = dict.fromkeys(self._leaving, Flag.LEAVE)
        words = [
            negotiator.compose(flags.get(rank, Flag(0)) | leave.get(rank, Flag(0)), self.now)
            for rank, negotiator in enumerate(self.ranks)
        ]
        combined = reduce(np.bitwise_and, words)
        outcomes = [negotiator.absorb(combined) for negotiator in self.ranks]
        outcome = self._same(outcomes)
        ready = self._same(
            [tuple(map(negotiator.registry.request, outcome.ready)) for negotiator in self.ranks]
        )
        if outcome.ready:
            for negotiator in self.ranks:
                negotiator.executed(np.array(outcome.ready, dtype=np.int64))
        if outcome.exchange:
            self._exchange(outcome)
        return list(ready)

    def run(self, most: int = 100) -> list[Request]:
        """Cycle until nothing is pending or `most` cycles are over; all that became ready."""
        done: list[Request] = []
        for _ in range(most):
            done += self.cycle()
            if not any(negotiator.pending for negotiator in self.ranks):
                break
        return done

    def _exchange(self, outcome: Outcome) -> None:
        self.exchanges += 1
        reports = [
            negotiator.report({}, self._leaving.get(rank)) for rank, negotiator in enumerate(self.ranks)
        ]
        merged = reduce(merge, reports, Report({}, {}, {}))
        if outcome.leaving:
            self.departed = merged.leaving
            return
        resolution: Resolution = self._same([negotiator.resolve(merged) for negotiator in self.ranks])
        for name, mismatch in resolution.mismatches.items():
            for rank, failed in enumerate(self.failed):
                if mismatch.ranks >> rank & 1:
                    failed[name] = mismatch.reason

    @staticmethod
    def _same(values: list[T]) -> T:
        if any(value != values[0] for value in values):
            raise AssertionError("the ranks decided differently")
        return values[0]


def tensor(name: str, shape: tuple[int, ...] = (4,), dtype: str = "float32") -> Request:
    """An ordinary all-reduce of one tensor."""
    return Request(name, OpKind.ALLREDUCE, (dtype,), (shape,), op=ReduceOp.SUM)


def submit_everywhere(
    fabric: Fabric, requests: Iterable[Request], order: Callable[[int, list[Request]], list[Request]]
) -> None:
    """Every rank submits the same requests, each in the order `order(rank, requests)`."""
    wanted = list(requests)
    for rank in range(len(fabric.ranks)):
        for request in order(rank, list(wanted)):
            fabric.submit(rank, request)
