"""Process sets: which ranks take part in an operation.

A set is made of ranks, and is then registered with the runtime, by all ranks in
the same order: through `init(process_sets=[...])` or `add_process_set`. Sets may
overlap; operations of different sets never wait for each other, and names belong
to a set. Called on the threads that submit; registration and removal wait.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from fusion import runtime

if TYPE_CHECKING:
    from fusion.group import Group


def _checked_ranks(ranks: Any) -> tuple[int, ...]:
    try:
        return tuple(sorted(map(operator.index, ranks)))
    except TypeError:
        raise ValueError(
            f"a ProcessSet is made of a list of ranks or an mpi4py communicator, not of {ranks!r}"
        ) from None


class ProcessSet:
    """Some of the ranks. Sets of the same ranks are equal.

    Args:
        ranks_or_comm: the ranks, in any order, or an mpi4py communicator of them.

    Attributes:
        process_set_id: number given by the runtime, 0 for all ranks; None while the
            set is not registered.
        mpi_comm: the communicator it was made from, or None.

    Raises:
        ValueError: it is neither a list of integers nor a communicator.
    """

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        self.process_set_id: int | None = None
        self.mpi_comm: Any = None
        self._ranks: tuple[int, ...] | None = None
        self._runtime: weakref.ref[runtime.Runtime] | None = None
        if hasattr(ranks_or_comm, "Get_rank") and hasattr(ranks_or_comm, "Split"):
            self.mpi_comm = ranks_or_comm
        else:
            self._ranks = _checked_ranks(ranks_or_comm)

    @property
    def ranks(self) -> list[int] | None:
        """Its ranks, ascending; None for a set of a communicator that is not registered yet."""
        return None if self._ranks is None else list(self._ranks)

    def size(self) -> int | None:
        """How many ranks are in the set; None while it is not registered."""
        return None if self.process_set_id is None or self._ranks is None else len(self._ranks)

    def rank(self) -> int | None:
        """This rank's place in the set; None while it is not registered.

        It is for reading results, such as those of `allgather`: a `root_rank` is
        always a rank among all ranks.

        Raises:
            ValueError: this rank is not in the set.
        """
        return None if self.process_set_id is None else group_of(self).topology.rank

    def included(self) -> bool | None:
        """Whether this rank is in the set; None if its ranks are not known yet."""
        return None if self._ranks is None else runtime.current().topology.rank in self._ranks

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProcessSet):
            return NotImplemented
        mine, theirs = self.ranks, other.ranks
        return self is other or (mine is not None and mine == theirs)

    def __hash__(self) -> int:
        return hash(ProcessSet)  # Ranks may become known later; there are few sets.

    def __repr__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"
        )

    def __deepcopy__(self, _: Any) -> ProcessSet:
        return self  # A copied model still talks to the same ranks.

    def __reduce__(self) -> Any:
        return "global_process_set" if self is global_process_set else (ProcessSet, (self._ranks or (),))

    def _register(self, number: int, ranks: Sequence[int]) -> None:
        self.process_set_id, self._ranks = number, tuple(ranks)
        self._runtime = weakref.ref(runtime.current())

    def _invalidate(self) -> None:
        self.process_set_id = None

    def _registered_in(self, current: runtime.Runtime) -> bool:
        made_in = None if self._runtime is None else self._runtime()
        return self.process_set_id is not None and made_in is current


class _GlobalProcessSet(ProcessSet):
    """The set of all ranks, of whichever runtime runs."""

    def __init__(self) -> None:
        super().__init__(())
        self.process_set_id = 0

    @property
    def ranks(self) -> list[int]:
        """All ranks; none before `init`."""
        return list(range(self.size())) if runtime.is_initialized() else []

    def size(self) -> int:
        """How many ranks there are."""
        return runtime.current().topology.size

    def included(self) -> bool:
        """Whether this rank is in the set: always."""
        return True

    def _registered_in(self, current: runtime.Runtime) -> bool:  # noqa: ARG002 - it is in every one
        return True


global_process_set: ProcessSet = _GlobalProcessSet()
"""All ranks."""


def group_of(process_set: ProcessSet) -> Group:
    """The running ranks behind a set.

    Raises:
        TypeError: it is not a process set.
        ValueError: it is not registered, or this rank is not in it.
    """
    current = runtime.current()
    if process_set is global_process_set:
        return current.world
    group = current.group(number_of(process_set))
    if group is None:
        raise ValueError(
            f"rank {current.topology.rank} is not in the process set of ranks {process_set.ranks}: "
            "only its members can use it (process_set.included() says who is one)"
        )
    return group


def number_of(process_set: ProcessSet) -> int:
    """The number of a registered set.

    Raises:
        TypeError: it is not a process set.
        ValueError: it is not registered with the runtime that runs.
    """
    if not isinstance(process_set, ProcessSet):
        raise TypeError(f"process_set must be a ProcessSet, not {type(process_set).__name__}")
    number = process_set.process_set_id
    if number is None or not process_set._registered_in(runtime.current()):
        raise ValueError(
            f"{process_set} is not registered: pass it to init(process_sets=[...]) or add_process_set(); "
            "a set ends with remove_process_set() and with shutdown()"
        )
    return number


def root_in(process_set: ProcessSet, root_rank: int, name: str) -> int:
    """The place in the set of a root given as a rank among all ranks.

    Raises:
        ValueError: the root is not in the set.
    """
    ranks = group_of(process_set).ranks
    try:
        return ranks.index(root_rank)
    except ValueError:
        known = (
            f"ranks are 0 to {len(ranks) - 1}"
            if process_set is global_process_set
            else f"the process set has ranks {list(ranks)}"
        )
        raise ValueError(f"'{name}': root_rank is {root_rank}, but {known}") from None


def init_process_sets(sets: Iterable[ProcessSet] | str | None) -> None:
    """Register the sets of `init`; see there. Collective if there are any."""
    if sets is None or (isinstance(sets, str) and sets.lower() == "dynamic"):
        return
    chosen: list[Any] = list(sets)
    if not all(isinstance(each, ProcessSet) for each in chosen):
        raise TypeError(f'process_sets must be a list of ProcessSet or "dynamic", not {sets!r}')
    mine = [_ranks_of(each) for each in chosen]
    for ranks in _agreed(mine, [each.mpi_comm is not None for each in chosen]):
        if ranks not in _registered().values():
            runtime.current().add_process_set(ranks).result()
    numbers = {ranks: number for number, ranks in _registered().items()}
    seen = {0}
    duplicates = []
    for index, (each, ranks) in enumerate(zip(chosen, mine, strict=True)):
        if numbers[ranks] in seen:
            each._invalidate()
            duplicates.append(index)
        else:
            seen.add(numbers[ranks])
            each._register(numbers[ranks], ranks)
    if duplicates:
        raise ValueError(
            f"entries {duplicates} of process_sets have the ranks of an earlier entry or of all ranks: leave "
            f"them out and call init again ({chosen[duplicates[0]]})"
        )


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a set. Every rank calls this, members or not, in the same order.

    Args:
        process_set: a set made of ranks, or the ranks.

    Returns:
        The registered set.

    Raises:
        ValueError: a set of the same ranks is registered, or there are no such ranks.
        NotImplementedError: it was made of a communicator: `init` takes those.
        FusionError: MPI was started without MPI_THREAD_MULTIPLE.
    """
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if made.mpi_comm is not None and made.ranks is None:
        raise NotImplementedError(
            "a process set of a communicator can be passed to init(process_sets=[...]) only: "
            "use add_process_set with a list of ranks"
        )
    ranks = _ranks_of(made)
    if ranks in _registered().values():
        raise ValueError(f"there is a process set of the ranks {list(ranks)} already: use that one")
    made._register(runtime.current().add_process_set(ranks).result(), ranks)
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """End a set; operations pending in it fail. Every rank calls this, in the same order.

    Returns:
        Whether it was ended: False for `global_process_set` and for a set that is
        not registered.
    """
    current = runtime.current()
    if process_set.process_set_id in (None, 0) or not process_set._registered_in(current):
        return False
    number = number_of(process_set)
    process_set._invalidate()
    if number not in _registered():
        return False
    current.remove_process_set(number).result()
    return True


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """The ranks of every registered set, of all ranks included, by number."""
    return {number: list(ranks) for number, ranks in sorted(_registered().items())}


def _registered() -> dict[int, tuple[int, ...]]:
    return runtime.current().process_sets()


def _ranks_of(process_set: ProcessSet) -> tuple[int, ...]:
    """The ranks of a set that is to be registered, checked."""
    ranks = process_set.ranks
    if process_set.mpi_comm is not None and process_set is not global_process_set:
        ranks = runtime.current().ranks_of(process_set.mpi_comm)
    size = runtime.current().topology.size
    assert ranks is not None
    if not ranks or len(set(ranks)) < len(ranks) or ranks[0] < 0 or ranks[-1] >= size:
        raise ValueError(f"a process set needs different ranks from 0 to {size - 1}, not {ranks}")
    return tuple(ranks)


def _agreed(mine: list[tuple[int, ...]], may_differ: list[bool]) -> list[tuple[int, ...]]:
    """The different sets of all ranks, entry by entry; those of communicators differ from rank to rank."""
    from fusion.torch.objects import allgather_object  # It takes a process set itself.

    lists = allgather_object(list(zip(mine, may_differ, strict=True)), name="init.process_sets")
    if len(set(map(len, lists))) > 1:
        raise ValueError(
            f"ranks gave init different numbers of process sets: {[len(each) for each in lists]}"
        )
    for index, entry in enumerate(zip(*lists, strict=True)):
        if len(set(entry)) > 1 and not all(differs for _, differs in entry):
            raise ValueError(
                f"ranks gave init different process sets as entry {index}: {[list(r) for r, _ in entry]}"
            )
    return list(dict.fromkeys(ranks for entry in zip(*lists, strict=True) for ranks, _ in entry))
