"""The process sets of this rank: a group for each that it is in, and who is in the others.

Made by `fusion.runtime.init`. Sets are made and dropped on the cycle thread of
the world, in the order all ranks share; any thread may look one up.

Importing this module starts MPI, because the data plane does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from coordinator.executor import Entry, Executor, Work
from coordinator.handle import Handle
from coordinator.messages import OpKind, Request, Response
from coordinator.recorder import Recorder
from fusion.config import Config
from fusion.group import Group
from fusion.memory import MemoryReport
from fusion.tuning.tuner import prepare

if TYPE_CHECKING:
    from mpi4py import MPI


class ProcessSets:
    """See the module. Making it is collective over `comm`.

    Args:
        comm: all ranks.
        config: of every set.
        recorder: of this rank.
        pinned: the keys that the user gave; tuning, which is of the world alone, leaves them as they are.

    Attributes:
        world: the group of all ranks, set number 0; not started yet.
    """

    def __init__(
        self, comm: MPI.Intracomm, config: Config, recorder: Recorder, pinned: Collection[str] = ()
    ) -> None:
        self._comm = comm
        self._config = config
        self._recorder = recorder
        self._made = 0
        self.world = Group(
            comm,
            config,
            recorder,
            number=0,
            ranks=range(comm.size),
            wrap=lambda executor: _WithProcessSets(executor, self._make, self._drop),
            tune=(lambda topology: prepare(config, pinned, topology.nodes, topology.rank))
            if config.autotune == "on"
            else None,
        )
        self._groups: dict[int, Group] = {0: self.world}
        self._ranks: dict[int, tuple[int, ...]] = {0: self.world.ranks}

    def group(self, number: int) -> Group | None:
        """The process set of that number, if this rank is in it."""
        return self._groups.get(number)

    def ranks(self) -> dict[int, tuple[int, ...]]:
        """The ranks of every process set by number, whether or not this rank is in it."""
        return dict(self._ranks)

    def memory(self) -> MemoryReport:
        """What the buffers of all sets that this rank is in take."""
        groups = list(self._groups.values())
        return sum((group.executor.memory() + group.devices.memory() for group in groups), MemoryReport())

    def leave(self, reason: str, timeout: float | None = None) -> bool:
        """End this rank's part in all sets, the world last; see `Coordinator.leave`."""
        agreed = True
        for number in sorted(self._groups, reverse=True):
            agreed &= self._groups[number].coordinator.leave(reason, timeout)
        return agreed

    # On the cycle thread of the world.

    def _make(self, ranks: tuple[int, ...]) -> int:
        self._made += 1
        number = self._made
        self._ranks[number] = ranks
        if self._comm.rank in ranks:
            comm = self._comm.Create_group(self._comm.group.Incl(ranks), tag=number)
            group = Group(comm, self._config, self._recorder, number=number, ranks=ranks)
            comm.Free()
            self._groups[number] = group
            group.start()
        return number

    def _drop(self, number: int) -> None:
        self._ranks.pop(number, None)
        group = self._groups.pop(number, None)
        if group is not None:
            group.coordinator.leave("the process set was removed")


class _WithProcessSets:
    """An executor that can also make and remove process sets."""

    def __init__(
        self, executor: Executor, make: Callable[[tuple[int, ...]], int], drop: Callable[[int], None]
    ) -> None:
        self._executor = executor
        self._make = make
        self._drop = drop

    def execute(self, response: Response, entries: Sequence[Entry]) -> Work | None:
        request = response.first
        if request.kind != OpKind.PROCESS_SET:
            return self._executor.execute(response, entries)
        if request.root_rank >= 0:
            self._drop(request.root_rank)
            entries[0].outputs[0] = request.root_rank
        else:
            entries[0].outputs[0] = self._make(request.shapes[0])
        return None

    def absent(self, request: Request, handle: Handle) -> Entry:
        return self._executor.absent(request, handle)

    def close(self) -> None:
        self._executor.close()

    def abort(self) -> None:
        self._executor.abort()
