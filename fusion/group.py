"""A process set on one rank: its topology, its executor, and the coordinator that serves it.

Each set has a cycle thread and communicators of its own, so operations of
different sets, overlapping ones included, never wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch

from coordinator.coordinator import Coordinator
from coordinator.executor import Entry, Executor
from coordinator.handle import Handle
from coordinator.messages import Request
from coordinator.recorder import Recorder
from coordinator.settings import Settings
from coordinator.tuning import Tuning
from coordinator.waiting import Waiter
from fusion.config import Config
from fusion.devices import Devices
from fusion.executor import CpuExecutor
from fusion.topology import Topology
from fusion.tuning.tuner import Prepared

if TYPE_CHECKING:
    from mpi4py import MPI

    from fusion.cuda.device import Mark

_MIB = 1 << 20


class Group:
    """The ranks of a process set, running. Making one is collective over them.

    Args:
        comm: the ranks; duplicated.
        config: of the runtime.
        recorder: of the runtime.
        number: of the set, 0 for all ranks.
        wrap: adds operations to the executor.
        tune: what to tune, given the topology; default nothing.

    Attributes:
        number: of the set.
        ranks: its members, as ranks of the world, in the order of `comm`.
        topology: of the members.
        executor: of the set, without what `wrap` added.
        devices: where tensors may be.
        add: what `submit` does with an entry, for a caller that makes its own.
        bell: of the handles.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        config: Config,
        recorder: Recorder,
        *,
        number: int,
        ranks: Sequence[int],
        wrap: Callable[[Executor], Executor] = lambda executor: executor,
        tune: Callable[[Topology], Prepared] | None = None,
    ) -> None:
        from coordinator.mpi_wire import MpiWire

        self.number = number
        self.ranks = tuple(ranks)
        self.topology = Topology.create(comm)
        wire = MpiWire(comm, self.ranks)
        prepared = tune(self.topology) if tune is not None else None
        room = prepared.space if prepared is not None else None
        waiter = Waiter(wire.check)
        self.executor = CpuExecutor(self.topology, waiter, recorder, config, room)
        self.devices = Devices(self.executor, self.topology, waiter, recorder, config)
        self.coordinator = Coordinator(
            wire,
            wrap(self.devices),
            _settings(config),
            recorder,
            tuning=Tuning(self.executor.retune, prepared.tuner) if prepared is not None else None,
            name=f"fusion-cycle-{number}",
        )
        self.add, self.bell = self.coordinator.submit, self.coordinator.bell
        self._names = _Names(self.coordinator.in_flight)

    def start(self) -> None:
        """Start serving."""
        self.coordinator.start()

    def submit(
        self,
        request: Request,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor | None],
        *,
        extra: Any = None,
        unpack: Callable[[list[Any]], Any] | None = None,
        ready: Sequence[Mark] = (),
    ) -> Handle:
        """Queue an operation; see `coordinator.executor.Entry` for the arguments.

        Tensors on a device are read after what the calling thread's current stream has been
        given so far, and after the marks in `ready`.

        Raises:
            ValueError: the tensors are on another device than this rank's.
            DuplicateNameError: the name is in flight on this rank.
            FusionError: the runtime has ended; says why.
        """
        handle = Handle(request.name, self.bell)
        entry = Entry(request, inputs, outputs, handle, time.monotonic(), extra, unpack)
        if request.device != "cpu":
            entry.ready = (*ready, *self.devices.mark(inputs, request.name))
        self.add(entry)
        return handle

    def unnamed(self, kind: str, *, blocking: bool) -> str:
        """A name for a tensor that was given none, the same on every rank that
        submits unnamed operations of a kind in the same order."""
        return self._names.next(kind, blocking=blocking)


class _Names:
    """Names for operations that the caller did not name.

    A blocking call reuses one name, so that a loop of them is negotiated from the
    cache; any other takes the next number of its kind.
    """

    def __init__(self, in_flight: Callable[[str], bool]) -> None:
        self._in_flight = in_flight
        self._lock = Lock()
        self._counts: dict[str, int] = {}

    def next(self, kind: str, *, blocking: bool) -> str:
        reusable = f"{kind}.blocking"
        if blocking and not self._in_flight(reusable):
            return reusable
        with self._lock:
            count = self._counts.get(kind, 0)
            self._counts[kind] = count + 1
        return f"{kind}.noname.{count}"


def _settings(config: Config) -> Settings:
    return Settings(
        fusion_threshold=int(config.fusion_threshold_mb * _MIB),
        cycle_time_s=config.cycle_time_ms / 1e3,
        cache_capacity=config.cache_capacity,
        stall_warning_s=config.stall_warning_s,
        stall_shutdown_s=config.stall_shutdown_s,
    )
