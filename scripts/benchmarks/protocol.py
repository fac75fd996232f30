"""`protocol`: what negotiation costs, without MPI: registration at many simulated ranks, and a steady cycle.

Shows the bars "registration of 10,000 tensors at 4,096 simulated ranks" and
"steady-state cycle, 500 cached tensors". Runs in one process. All simulated
ranks share its memory, so large numbers of ranks get fewer tensors each.
"""

from __future__ import annotations

import pickle
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from coordinator.coordinator import Coordinator
from coordinator.executor import Entry
from coordinator.handle import Handle
from coordinator.messages import Request, Response
from coordinator.negotiation import Negotiator
from coordinator.recorder import Recorder
from coordinator.reports import Report, merge
from coordinator.settings import Settings
from coordinator.simulation import Fabric, submit_everywhere, tensor
from coordinator.wire import Words

T = TypeVar("T")

STEADY_TENSORS = 500
STEADY_CYCLES = 300


def measure(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Registration over numbers of ranks, in the same and in different orders; then the steady cycle."""
    budget, sizes = options["budget"], options["ranks"]
    few = max(1, min(options["tensors"], budget // max(sizes)))
    fitting = [size for size in sizes if size * options["tensors"] <= budget]
    results = [_registration(size, few, "same order") for size in sizes]
    results += [_registration(size, few, "different orders") for size in sizes]
    results += [_registration(size, options["tensors"], "same order, many") for size in fitting[-1:]]
    return [*results, _steady(STEADY_TENSORS)]


class _Watched(Negotiator):
    """Rank 0's negotiator, with a look at what it sends and how long it computes."""

    words = 0
    compute_s = 0.0

    def compose(self, flags: Any, now: float) -> Words:
        """As before, timed."""
        start = time.perf_counter()
        words = super().compose(flags, now)
        self.compute_s += time.perf_counter() - start
        self.words += len(words)
        return words

    def absorb(self, words: Words) -> Any:
        """As before, timed."""
        start = time.perf_counter()
        outcome = super().absorb(words)
        self.compute_s += time.perf_counter() - start
        return outcome


def _registration(size: int, count: int, how: str) -> dict[str, Any]:
    fabric = Fabric(size, capacity=2 * count)
    watched = fabric.ranks[0] = _Watched(0, size, 2 * count)
    requests = [tensor(f"layer{index}.weight") for index in range(count)]
    shuffled = how == "different orders"
    submit_everywhere(fabric, requests, _shuffle if shuffled else _as_it_is)
    report_bytes = _merged_bytes(fabric) if shuffled else 0
    done = fabric.run(most=4 * count + 100)
    assert len(done) == count, "registration did not come to an end"
    return {
        "how": how,
        "ranks": size,
        "tensors": count,
        "cycles": fabric.cycles,
        "exchanges": fabric.exchanges,
        "words": watched.words,
        "allreduce_bytes": 8 * watched.words,
        "report_bytes": report_bytes,
        "messages_deep": (size - 1).bit_length() * (fabric.cycles + 2 * fabric.exchanges),
        "root_merges": (size - 1).bit_length() * fabric.exchanges,
        "rank0_ms": 1e3 * watched.compute_s,
        "rank0_us_per_tensor": 1e6 * watched.compute_s / count,
    }


def _as_it_is(_: int, wanted: list[Request]) -> list[Request]:
    return wanted


def _shuffle(rank: int, wanted: list[Request]) -> list[Request]:
    np.random.default_rng(rank).shuffle(wanted)
    return wanted


def _merged_bytes(fabric: Fabric) -> int:
    """Bytes of the report that the root sends down the tree, as the wire pickles it."""
    merged: Report = Report({}, {}, {})
    for negotiator in fabric.ranks:
        merged = merge(merged, negotiator.report({}, None))
    return len(pickle.dumps(merged))


class _OtherRanks:
    """A wire to ranks that always agree at once, and cost nothing."""

    rank, size = 0, 2
    ranks = range(2)

    def __init__(self) -> None:
        self.allreduces = 0
        self.exchanges = 0
        self._words: Words = np.empty(0, dtype=np.uint64)

    def start(self, words: Words) -> None:
        self.allreduces += 1
        self._words = words

    def test(self) -> bool:
        return True

    def result(self) -> Words:
        return self._words

    def exchange(self, mine: T, merge: Callable[[T, T], T]) -> T:
        self.exchanges += 1
        return merge(mine, mine)

    def announce(self, reason: str) -> None: ...

    def check(self) -> None: ...

    def close(self) -> None: ...


class _NoData:
    """An executor that moves nothing."""

    def execute(self, response: Response, entries: Sequence[Entry]) -> None: ...

    def absent(self, request: Request, handle: Handle) -> Entry:
        raise NotImplementedError

    def close(self) -> None: ...

    def abort(self) -> None: ...


def _steady(count: int) -> dict[str, Any]:
    """Turns of a real coordinator whose data plane and wire cost nothing, driven by hand on this thread."""
    wire = _OtherRanks()
    settings = Settings(64 << 20, 1e-3, 4096, 60.0, 0.0)
    coordinator = Coordinator(wire, _NoData(), settings, Recorder())
    requests = [tensor(f"layer{index}.weight") for index in range(count)]
    submitting, turns, negotiating = [], [], []
    for number in range(STEADY_CYCLES + 5):
        start = time.perf_counter()
        for request in requests:
            handle = Handle(request.name, coordinator.bell)
            coordinator.submit(Entry(request, (None,), [None], handle, enqueued_at=time.monotonic()))
        submitted = time.perf_counter()
        before = wire.allreduces, wire.exchanges
        while coordinator.in_flight(requests[-1].name):
            coordinator._cycle()
        if number >= 5:  # The first ones register.
            submitting.append(submitted - start)
            turns.append(time.perf_counter() - submitted)
            assert (wire.allreduces, wire.exchanges) == (before[0] + 1, before[1]), "not the steady state"
            negotiating.append(_compose_and_absorb(coordinator._negotiator, requests))
    return {
        "tensors": count,
        "allreduces": 1,
        "exchanges": 0,
        "submit_ms": 1e3 * statistics.median(submitting),
        "cycle_ms": 1e3 * statistics.median(turns),
        "negotiation_ms": 1e3 * statistics.median(negotiating),
    }


def _compose_and_absorb(negotiator: Negotiator, requests: Sequence[Request]) -> float:
    """Seconds of the negotiation alone: the ready bits out and in."""
    from coordinator.negotiation import Flag

    for request in requests:
        negotiator.submit(request, 0.0)
    start = time.perf_counter()
    outcome = negotiator.absorb(negotiator.compose(Flag(0), 0.0))
    took = time.perf_counter() - start
    assert len(outcome.ready) == len(requests)
    return took
