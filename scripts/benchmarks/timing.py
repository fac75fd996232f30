"""Measuring rivals fairly: alternating rounds in one process, the slowest rank counts.

Every contestant has its turn in every round, in an order that moves on by one
each round, so that a change of the machine's mood hits all alike. A turn warms
up, then times calls one by one between barriers. Runs on the main thread of
every rank, in step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mpi4py import MPI

LEAST_CALLS = 3
MOST_CALLS = 200
_SLOW = 4.0
"""A call that takes this many turns has one turn only: nobody waits minutes for its digits."""


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Contestant:
    """One way of doing the work.

    Attributes:
        run: does the work once; called on every rank.
        begin: before each turn, not timed.
        end: after each turn, not timed.
        batch: calls between two looks at the clock, for work of microseconds.
    """

    name: str
    run: Callable[[], object]
    begin: Callable[[], object] = _nothing
    end: Callable[[], object] = _nothing
    batch: int = 1


@dataclass
class Series:
    """Seconds of one contestant."""

    calls: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)
    """The median of each round."""

    @property
    def median(self) -> float:
        """Of the rounds' medians."""
        return statistics.median(self.rounds)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; milliseconds."""
        milli = [1e3 * value for value in self.rounds]
        return {
            "median_ms": 1e3 * self.median,
            "round_medians_ms": milli,
            "min_ms": 1e3 * min(self.calls),
            "max_ms": 1e3 * max(self.calls),
            "calls": len(self.calls),
        }


def chosen(contestants: Sequence[Contestant], only: Sequence[str]) -> list[Contestant]:
    """Those whose names contain any of the words `only`; all if it is empty."""
    return [found for found in contestants if is_chosen(found.name, only)]


def is_chosen(name: str, only: Sequence[str]) -> bool:
    """Whether a contestant of that name is among those that `only` asks for."""
    return not only or any(word in name for word in only)


def compare(
    comm: MPI.Intracomm, contestants: Sequence[Contestant], *, rounds: int, turn_s: float
) -> dict[str, Series]:
    """Time all contestants. Collective.

    Args:
        comm: the ranks; used between timed calls only.
        rounds: turns of each contestant.
        turn_s: about how long a turn may take; three calls at least, unless one takes far longer.
    """
    series = {contestant.name: Series() for contestant in contestants}
    slow: set[str] = set()
    for number in range(rounds):
        shift = number % len(contestants)
        for contestant in [*contestants[shift:], *contestants[:shift]]:
            if contestant.name in slow:
                continue
            times = _turn(comm, contestant, turn_s)
            if times[0] * contestant.batch > _SLOW * turn_s:
                slow.add(contestant.name)
            series[contestant.name].calls += times
            series[contestant.name].rounds.append(statistics.median(times))
    return series


def _turn(comm: MPI.Intracomm, contestant: Contestant, turn_s: float) -> list[float]:
    """Seconds of each timed call on the slowest rank; of the first call only, if that took very long."""
    contestant.begin()
    first = _slowest(comm, [_time_one(comm, contestant)])
    times = first
    if first[0] * contestant.batch <= _SLOW * turn_s:
        estimate = comm.bcast(_time_one(comm, contestant), root=0) * contestant.batch
        calls = max(LEAST_CALLS, min(MOST_CALLS, int(turn_s / max(estimate, 1e-9))))
        times = _slowest(comm, [_time_one(comm, contestant) for _ in range(calls)])
    contestant.end()
    return times


def _slowest(comm: MPI.Intracomm, mine: list[float]) -> list[float]:
    """Of each call, the time on the rank that took longest; the same on all ranks."""
    found = np.array(mine)
    comm.Allreduce(MPI.IN_PLACE, found, op=MPI.MAX)
    times: list[float] = found.tolist()
    return times


def _time_one(comm: MPI.Intracomm, contestant: Contestant) -> float:
    run, batch = contestant.run, contestant.batch
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(batch):
        run()
    return (time.perf_counter() - start) / batch
