"""How long a training step takes, seen from the cycle thread: no clock, no thread of its own.

A program that trains reduces the same names over and over. A step begins when a
name comes again, and its work is how many tensors and bytes it moved; steps are
compared only if their work is the same, so an evaluation or a broadcast in
between does not count. Names of unnamed asynchronous operations never come again and are passed over.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence

import msgspec

from coordinator.messages import OpKind, Response

_NO_WORK = (OpKind.BARRIER, OpKind.ARENA, OpKind.JOIN, OpKind.PROCESS_SET)
_UNNAMED = ".noname."
_MOST_NAMES = 1 << 17
"""A program that never uses a name twice has no steps: do not remember it for ever."""


class Work(msgspec.Struct, frozen=True):
    """What a step moved."""

    tensors: int
    nbytes: int
    in_arenas: int
    """Bytes that lay in static buckets."""


class Step(msgspec.Struct, frozen=True):
    """One step that has ended.

    Attributes:
        seconds: from its beginning to that of the next; NaN if its beginning was not seen.
    """

    work: Work
    seconds: float


class Steps:
    """Finds the steps in what cycles ran."""

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()
        self._work = Work(0, 0, 0)
        self._began = math.nan

    def forget(self) -> None:
        """Begin anew: of the step under way only what comes now is seen."""
        self._seen = set()
        self._work = Work(0, 0, 0)
        self._began = math.nan

    def ran(self, responses: Sequence[Response], at: float) -> list[Step]:
        """The steps that ended when these responses, agreed on at `at` seconds, began."""
        ended = []
        for response in responses:
            if response.kind in _NO_WORK:
                continue
            names = _names(response)
            if not self._seen.isdisjoint(names):
                ended.append(Step(self._work, at - self._began))
                self._seen, self._work, self._began = set(), Work(0, 0, 0), at
            self._add(response, names)
        return ended

    def _add(self, response: Response, names: Sequence[Hashable]) -> None:
        if len(self._seen) > _MOST_NAMES:
            self.forget()
        self._seen.update(names)
        if not names:
            return
        nbytes = response.nbytes
        in_arenas = nbytes if response.first.region is not None else 0
        before = self._work
        self._work = Work(
            before.tensors + len(response.parts), before.nbytes + nbytes, before.in_arenas + in_arenas
        )


def _names(response: Response) -> Sequence[Hashable]:
    """What is used once a step: names, or tensors of groups that several responses may share."""
    if response.grouped:
        return [(part.request.name, part.index) for part in response.parts]
    if any(_UNNAMED in name for name in response.names):
        return [name for name in response.names if _UNNAMED not in name]
    return response.names


class Usual:
    """Learns which work most steps of the program do, and notices when that changes."""

    LEARN = 4
    """Steps looked at before it says what is usual."""
    FORGET = 1000
    """Steps without two alike after which it begins anew."""
    PATIENCE = 20
    """Other steps in a row after which it learns anew."""

    def __init__(self) -> None:
        self._counts: Counter[Work] = Counter()
        self._others = 0
        self.work: Work | None = None
        """None while it learns."""

    def fits(self, step: Step) -> bool:
        """Whether a step is a usual one."""
        if self.work is None:
            self._learn(step.work)
            return False
        if step.work == self.work:
            self._others = 0
            return True
        self._others += 1
        if self._others >= self.PATIENCE:
            self.work, self._others = None, 0
            self._counts.clear()
        return False

    def _learn(self, work: Work) -> None:
        if self._counts.total() >= self.FORGET:
            self._counts.clear()
        self._counts[work] += 1
        if self._counts.total() < self.LEARN:
            return
        twice = {work: count for work, count in self._counts.items() if count > 1}
        if twice:  # What moves most bytes in all is what it pays to tune for.
            self.work = max(twice, key=lambda work: (twice[work] * work.nbytes, twice[work] * work.tensors))
