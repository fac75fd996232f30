"""`tuning`: what automatic tuning finds, beside a full grid of the same settings.

Shows the bar "within 5 % of the best point of a full grid on the link bench in at
most 40 samples". The job is tuned first; then every point of the grid is measured
in the same way; then the tuner's choice, the grid's best points and the settings of
the start take turns, and the ratio is made from these turns, so that neither a
lucky measurement nor the machine's mood decides. A grid that takes too long at
once can be dealt into parts, each beside a tuner of its own.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from mpi4py import MPI

import fusion.torch as hvd
from coordinator.tuning import Knobs
from fusion import runtime
from fusion.tuning import tuner
from fusion.tuning.search import Search
from fusion.tuning.space import Space
from scripts.benchmarks.shapes import SETS, describe

BEST = 3
"""Points of the grid that take part in the turns."""


class Walk:
    """Goes through given settings, where `fusion.tuning.search.Search` would choose.

    Attributes:
        confirming: never: windows are those of an exploring search.
    """

    def __init__(self, space: Space, points: Sequence[Knobs]) -> None:
        self._left = iter(points)
        self._at = self._start = space.start
        self.seconds: dict[Knobs, list[float]] = {}
        self.taken = 0
        self.confirming = False

    @property
    def best(self) -> tuple[Knobs, float]:
        return self._start, self.start_seconds

    @property
    def fastest(self) -> float:
        return min(map(self.median, self.seconds), default=float("nan"))

    @property
    def start_seconds(self) -> float:
        return self.median(self._start) if self._start in self.seconds else float("nan")

    def next(self) -> Knobs | None:
        found = next(self._left, None)
        if found is not None:
            self._at = found
        return found

    def tell(self, seconds: float) -> None:
        self.seconds.setdefault(self._at, []).append(seconds)
        self.taken += 1

    def median(self, knobs: Knobs) -> float:
        return statistics.median(self.seconds[knobs])


Made = Callable[[Space], "Search | Walk"]


def measure(comm: MPI.Intracomm, options: dict[str, Any]) -> list[dict[str, Any]]:
    """All sets of `options`, one after the other. On every rank."""
    results = []
    for name in options["sets"]:
        work = _Work(comm, name, options["compute_ms"])
        found = _one(comm, work, options)
        if found is not None:
            results.append({"work": describe(name), "ranks": comm.size, "tuning": found})
    return results


def _one(comm: MPI.Intracomm, work: _Work, options: dict[str, Any]) -> dict[str, Any] | None:
    """The figures of one set; None on other ranks than 0, which cannot know them."""
    search = work.run(lambda space: Search(space, options["samples"]))
    points: list[Knobs] = []
    if comm.rank == 0:
        points = _grid(work.space, options["coarse"])[options["part"] - 1 :: options["parts"]]
    points = comm.bcast(points, root=0)
    walk = work.run(lambda space: Walk(space, points), options["window_s"])
    turns: list[Knobs] = []
    contestants: list[Knobs] = []
    if comm.rank == 0:
        by_time = sorted(walk.seconds, key=walk.median)
        contestants = list(dict.fromkeys([search.best[0], *by_time[:BEST], work.space.start]))
        turns = [
            knobs
            for turn in range(options["rounds"])
            for knobs in (contestants if turn % 2 else reversed(contestants))
        ]
    turns = comm.bcast(turns, root=0)
    final = work.run(lambda space: Walk(space, turns))
    if comm.rank:
        return None
    best = min(contestants, key=final.median)  # The tuner's choice is a point of the grid too.
    tuned, start = search.best[0], work.space.start
    return {
        "samples": search.taken,
        "grid_points": len(points),
        "grid_best_ms": 1e3 * final.median(best),
        "tuned_ms": 1e3 * final.median(tuned),
        "start_ms": 1e3 * final.median(start),
        "tuned_by_grid_best": final.median(tuned) / final.median(best),
        "start_by_grid_best": final.median(start) / final.median(best),
        "grid_worst_ms": 1e3 * max(map(walk.median, walk.seconds)),
        "tuned": _words(work.space, tuned),
        "grid_best": _words(work.space, best),
    }


class _Work:
    """Steps that reduce one set of tensors again and again, tuned or led through settings."""

    def __init__(self, comm: MPI.Intracomm, name: str, compute_ms: float) -> None:
        self._comm = comm
        self._named = [(torch.zeros(shape), f"{name}.{n}") for n, shape in enumerate(SETS[name]())]
        self._named.reverse()
        self._parts = 20 if compute_ms else 1
        self._pause_s = compute_ms / 1e3 / self._parts

    def run(self, make: Made, window_s: float = tuner.LEAST_S) -> Any:
        """Train until the search that `make` makes of the space is over; the search, on rank 0.

        Args:
            window_s: least seconds of a sample.
        """
        made: list[Any] = []
        over = False

        def remember(space: Space, _samples: int) -> Any:
            self.space = space
            made[:] = [make(space)]
            return made[0]

        with patch.object(tuner, "Search", remember), patch.object(tuner, "LEAST_S", window_s):
            hvd.init(autotune="on")
            coordinator = runtime.current().world.coordinator
            while not over:
                self._step()
                over = self._comm.bcast(self._comm.rank == 0 and bool(made) and _is_over(coordinator), root=0)
            hvd.shutdown()
        return made[0] if made else None

    def _step(self) -> None:
        each = -(-len(self._named) // self._parts)
        handles = []
        for at in range(0, len(self._named), each):
            if self._pause_s:
                time.sleep(self._pause_s)  # What the backward pass would take.
            handles += [
                hvd.allreduce_async_(tensor, name=name, op=hvd.Sum)
                for tensor, name in self._named[at : at + each]
            ]
        for handle in handles:
            hvd.synchronize(handle)


def _is_over(coordinator: Any) -> bool:
    return coordinator.tuning.tuner is None


def _grid(space: Space, coarse: bool) -> list[Knobs]:
    """Every point, or every other value of each key with the one of the start."""
    values = [
        sorted({*range(0, len(choices), 2 if coarse else 1), choices.index(getattr(space.start, key))})
        for key, choices in space.choices.items()
    ]
    return [space.at(dict(zip(space.choices, point, strict=True))) for point in itertools.product(*values)]


def _words(space: Space, knobs: Knobs) -> str:
    return ", ".join(f"{key} {getattr(knobs, key)}" for key in space.choices)
