"""Operations between nodes under way, of which the next is begun before the last one has ended.

Between two buckets a link would rest while one is unpacked and the other packed. So
a collective packs, begins its ring, leaves the rest to be done later, and returns.
Cycle thread only; whoever waits asks the pipeline to `advance`.

Guarantees: operations end in the order in which they began, on every rank of a node
alike; at most `DEPTH` are under way; what an operation leaves for later begins only
when every rank of the node is through with what it had to exchange.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from coordinator.waiting import SPIN_S, Waiter
from fusion.collectives.node import NodeBuffer

DEPTH = 4
"""Two buckets keep a link busy, and each may have a small one beside it that did not fit."""


class Crossing(Protocol):
    """What this rank exchanges with other nodes in one operation."""

    first: bool
    """Set to whether it may use the link as it likes; else an earlier one goes before it."""

    @property
    def complete(self) -> bool: ...

    def advance(self) -> bool:
        """Do what can be done without waiting; says whether that was anything worth while."""
        ...

    def rest(self) -> float:
        """Seconds after which to ask again, if that is long; 0 if unknown or soon."""
        ...


class Operation:
    """One operation.

    Args:
        node: the ranks that wait for one another's crossings.
        crossing: on a rank that has one.
        after_crossing: what this rank does for the others when its crossing is complete.
        after_all: what it does when all of the node have done that.
    """

    def __init__(
        self,
        node: NodeBuffer,
        crossing: Crossing | None,
        after_crossing: Callable[[], None],
        after_all: Callable[[], None],
    ) -> None:
        self.crossing = crossing
        self._node = node
        self._after_crossing = after_crossing
        self._after_all = after_all
        self._ticket: int | None = None
        self.done = False

    def advance(self, *, first: bool) -> bool:
        """Do what can be done without waiting; says whether there was something."""
        moved = False
        if self.crossing is not None and not self.crossing.complete:
            self.crossing.first = first
            moved = self.crossing.advance()
            if not self.crossing.complete:
                return moved
        if not first:
            return moved
        if self._ticket is None:
            self._after_crossing()
            self._ticket = self._node.announce()
        if not self._node.announced(self._ticket):
            return moved
        self._after_all()
        # What is to be done refers to the job, and the job to this: without the circle all goes at once.
        self.crossing, self._after_crossing, self._after_all = None, nothing, nothing
        self.done = True
        return True

    def rest(self) -> float:
        """Seconds after which to ask again, if that is long; 0 if unknown or soon."""
        return self.crossing.rest() if self.crossing is not None and not self.crossing.complete else 0.0


def nothing() -> None:
    """What an operation does after a step that nothing follows on."""


class Pipeline:
    """See the module.

    Args:
        waiter: for waits until there is room, or nothing under way.
    """

    def __init__(self, waiter: Waiter) -> None:
        self._waiter = waiter
        self._operations: deque[Operation] = deque()
        self._begun = 0

    def __len__(self) -> int:
        return len(self._operations)

    def enter(self) -> int:
        """Wait until there is room for one more; the lane it is to use."""
        self._wait(DEPTH - 1)
        self._begun += 1
        return self._begun % DEPTH

    def add(self, operation: Operation) -> None:
        """Take charge of an operation that has entered."""
        self._operations.append(operation)
        self.advance()

    def advance(self) -> bool:
        """Do what can be done without waiting; says whether there was something."""
        moved, first = False, True
        for operation in list(self._operations):
            moved |= operation.advance(first=first)
            if operation.done:
                self._operations.popleft()
            else:
                first = False
        return moved

    def drain(self) -> None:
        """Wait until nothing is under way."""
        self._wait(0)

    def linger(self, operation: Operation) -> None:
        """Wait for an operation's end for as long as a wait spins, if it may be that near."""
        if self.rest() <= SPIN_S:
            self._waiter.soon(lambda: operation.done or (self.advance() and operation.done))

    def rest(self) -> float:
        """Seconds after which to ask again, if that is long; 0 if unknown or soon."""
        return self._operations[0].rest() if self._operations else 0.0

    def _wait(self, most: int) -> None:
        while len(self._operations) > most:
            self._waiter.until(self.advance, expected=self.rest())
