"""Several coordinators in one process, a thread each, over a wire of plain memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

import numpy as np

from coordinator.coordinator import Coordinator
from coordinator.errors import FusionError, RankLeftError
from coordinator.executor import Entry
from coordinator.handle import Handle
from coordinator.messages import Request, Response
from coordinator.recorder import Recorder
from coordinator.settings import Settings
from coordinator.tuning import Knobs, Tuner, Tuning
from coordinator.wire import Words

DEFAULTS = Settings(
    fusion_threshold=1 << 20, cycle_time_s=0.001, cache_capacity=64, stall_warning_s=0.0, stall_shutdown_s=0.0
)


class Hub:
    """What the wires of all ranks share: the contributions to each numbered step."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.failure: str | None = None
        self._lock = threading.Lock()
        self._steps: dict[tuple[str, int], dict[int, Any]] = {}

    def give(self, step: tuple[str, int], rank: int, value: Any) -> None:
        with self._lock:
            self._steps.setdefault(step, {})[rank] = value

    def all(self, step: tuple[str, int]) -> list[Any] | None:
        with self._lock:
            given = self._steps.get(step, {})
            return [given[rank] for rank in range(self.size)] if len(given) == self.size else None


class ThreadWire:
    """One rank's end of a `Hub`."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.rank, self.size, self.ranks = rank, hub.size, range(hub.size)
        self._hub = hub
        self._rounds = self._exchanges = 0

    def start(self, words: Words) -> None:
        self._rounds += 1
        self._hub.give(("round", self._rounds), self.rank, words.copy())

    def test(self) -> bool:
        return self._hub.all(("round", self._rounds)) is not None

    def result(self) -> Words:
        words = self._hub.all(("round", self._rounds))
        assert words is not None
        return reduce(np.bitwise_and, words)

    def exchange(self, mine: Any, merge: Callable[[Any, Any], Any]) -> Any:
        import pickle

        self._exchanges += 1
        step = ("exchange", self._exchanges)
        self._hub.give(step, self.rank, pickle.dumps(mine))
        while (given := self._hub.all(step)) is None:
            self.check()
            time.sleep(1e-4)
        return reduce(merge, map(pickle.loads, given))

    def announce(self, reason: str) -> None:
        self._hub.failure = f"rank {self.rank} failed: {reason}"

    def check(self) -> None:
        if self._hub.failure is not None:
            raise RankLeftError(self._hub.failure)

    def close(self) -> None:
        pass


class SummingExecutor:
    """Sums Python floats over the ranks of a hub and notes the responses it ran."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self._hub, self._rank = hub, rank
        self._steps = 0
        self.ran: list[Response] = []
        self.retuned: list[tuple[int, Knobs]] = []
        """How many responses had run when settings changed, and to what."""
        self.fail_on: str | None = None
        self.closed = False
        self.aborted = False

    def execute(self, response: Response, entries: Sequence[Entry]) -> None:
        if any(part.request.name == self.fail_on for part in response.parts):
            raise MemoryError("no room")
        self.ran.append(response)
        self._steps += 1
        step = ("data", self._steps)
        mine = [entry.inputs[part.index] for entry, part in zip(entries, response.parts, strict=True)]
        self._hub.give(step, self._rank, mine)
        while (given := self._hub.all(step)) is None:
            time.sleep(1e-4)
        for entry, part, values in zip(entries, response.parts, zip(*given, strict=True), strict=True):
            entry.outputs[part.index] = sum(values)

    def absent(self, request: Request, handle: Handle) -> Entry:
        count = len(request.shapes)
        return Entry(request, [0.0] * count, [None] * count, handle, enqueued_at=time.monotonic())

    def retune(self, knobs: Knobs) -> None:
        self.retuned.append((len(self.ran), knobs))

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True


class Ranks:
    """Coordinators of `size` ranks, running."""

    def __init__(self, size: int, settings: Settings, tuner: Tuner | None = None) -> None:
        hub = Hub(size)
        self.executors = [SummingExecutor(hub, rank) for rank in range(size)]
        self.coordinators = [
            Coordinator(
                ThreadWire(hub, rank),
                self.executors[rank],
                settings,
                Recorder(rank),
                tuning=Tuning(self.executors[rank].retune, None if rank else tuner) if tuner else None,
            )
            for rank in range(size)
        ]

    def submit(self, rank: int, request: Request, *values: float) -> Handle:
        coordinator = self.coordinators[rank]
        handle = Handle(request.name, coordinator.bell)
        outputs: list[Any] = [None] * len(request.shapes)
        unpack = list if len(outputs) > 1 else None
        coordinator.submit(
            Entry(request, values, outputs, handle, enqueued_at=time.monotonic(), unpack=unpack)
        )
        return handle


@contextmanager
def running(size: int, settings: Settings = DEFAULTS, tuner: Tuner | None = None) -> Iterator[Ranks]:
    """Start the ranks; whatever happens, all of them leave at the end. `tuner` is rank 0's."""
    ranks = Ranks(size, settings, tuner)
    for coordinator in ranks.coordinators:
        coordinator.start()
    try:
        yield ranks
    finally:
        for coordinator in ranks.coordinators:
            coordinator.leave("the test is over", timeout=10)
        assert all(coordinator.ended for coordinator in ranks.coordinators)


def failure(handle: Handle) -> BaseException:
    """The error a handle fails with."""
    error = handle.exception(10)
    assert isinstance(error, FusionError), error
    return error
