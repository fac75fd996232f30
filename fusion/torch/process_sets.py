"""Which ranks take part in an operation. For now the set of all ranks is the only one.

The parameter `process_set` exists on every operation so that scripts written for
it run; a set other than `global_process_set` is refused with a clear error.
"""

from __future__ import annotations

from fusion import runtime


class ProcessSet:
    """A set of ranks.

    Attributes:
        process_set_id: its number, 0 for all ranks.
    """

    def __init__(self, process_set_id: int) -> None:
        self.process_set_id = process_set_id

    @property
    def ranks(self) -> list[int]:
        """The ranks of the set, ascending."""
        return list(range(self.size()))

    def size(self) -> int:
        """How many ranks are in the set."""
        return runtime.current().topology.size

    def rank(self) -> int:
        """This rank's place in the set."""
        return runtime.current().topology.rank

    def included(self) -> bool:
        """Whether this rank is in the set."""
        return True

    def __repr__(self) -> str:
        return f"ProcessSet({self.process_set_id})"


global_process_set = ProcessSet(0)
"""All ranks."""


def check(process_set: ProcessSet) -> None:
    """Refuse a set that is not there yet.

    Raises:
        TypeError: it is not a process set.
        NotImplementedError: it is not the set of all ranks.
    """
    if process_set is global_process_set:
        return
    if not isinstance(process_set, ProcessSet):
        raise TypeError(f"process_set must be a ProcessSet, not {type(process_set).__name__}")
    raise NotImplementedError("operations run on all ranks: process sets other than global_process_set are not built yet")
