"""What negotiation needs of a network: one small all-reduce a cycle, and rarely more.

`MpiWire` in `mpi_wire.py` is the real one, `Fabric` in `simulation.py` runs any
number of ranks in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
T = TypeVar("T")


class Wire(Protocol):
    """Connects the cycle threads of all ranks. Cycle thread only, but for `check`."""

    rank: int
    size: int
    ranks: Sequence[int]
    """What messages call them: the members' ranks among all ranks of the job."""

    def start(self, words: Words) -> None:
        """Begin a bitwise-AND all-reduce of `words`, of equal length on all ranks."""
        ...

    def test(self) -> bool:
        """Whether the all-reduce that was begun is complete."""
        ...

    def result(self) -> Words:
        """Its result, after `test()` was true; valid until the next `start`."""
        ...

    def exchange(self, mine: T, merge: Callable[[T, T], T]) -> T:
        """Combine one object of each rank by `merge`, an associative function that
        is called with lower ranks on the left; every rank gets the result."""
        ...

    def announce(self, reason: str) -> None:
        """Tell every rank that this one has failed and takes no further part."""
        ...

    def check(self) -> None:
        """Raise `RankLeftError` if a rank has announced a failure."""
        ...

    def close(self) -> None:
        """Collective: give back communicators."""
        ...
