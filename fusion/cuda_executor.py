"""The data plane on GPUs: gives the responses that the control plane agreed on to the device.

Made on the cycle thread by `fusion.devices` when the first response for a device
comes, which it does on every rank at the same point; used on that thread only.
It owns the side stream, the fusion buffer, the arenas and the communicators.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial

import torch

from coordinator.errors import FusionError
from coordinator.executor import Entry, Executor, Work
from coordinator.messages import OpKind, ReduceOp, Request, Response
from coordinator.waiting import Waiter
from fusion.channel import Channel
from fusion.collectives.device_allreduce import DeviceAllreduce
from fusion.collectives.device_compressed import DeviceCompressedAllreduce
from fusion.collectives.device_job import DeviceCollective, DeviceJob, DeviceMeans
from fusion.collectives.device_rows import (
    DeviceAllgather,
    DeviceAlltoall,
    DeviceBroadcast,
    DeviceReducescatter,
)
from fusion.collectives.job import Recorder
from fusion.collectives.nccl import Communicator
from fusion.collectives.staged import Staged
from fusion.cuda.arena import DeviceArena
from fusion.cuda.device import Device
from fusion.cuda.reach import Choice, Reach, Standing, choose_reach
from fusion.cuda.work import DeviceWork
from fusion.memory import LEAST_BUFFER_BYTES, MemoryReport
from fusion.packing import LayoutCache
from fusion.topology import Topology

logger = logging.getLogger("fusion")

ABORT_S = 5.0
"""How long the end of a failed runtime may wait for NCCL."""


class CudaExecutor:
    """Runs responses for tensors on this rank's device. Making one is collective.

    Args:
        device: of this rank.
        topology: of the process set.
        waiter: for waiting for other ranks.
        recorder: is told how long operations take.
        wanted: the setting `gpu`.
        exact: whether 16-bit floats are summed in float32.
        buffer_bytes: of the fusion buffer.
        segment_bytes: of a message between nodes.
        host: runs what goes through host memory.

    Raises:
        FusionError: the setting asks for what this job cannot have; alike on all ranks.
    """

    def __init__(
        self,
        device: Device,
        topology: Topology,
        waiter: Waiter,
        recorder: Recorder,
        *,
        wanted: str,
        exact: bool,
        buffer_bytes: int,
        segment_bytes: int,
        host: Executor,
    ) -> None:
        self._device = device
        self._recorder = recorder
        self._layouts = LayoutCache()
        self._arenas: dict[int, DeviceArena] = {}
        self._arenas_made = 0
        self._world = Channel(topology.world, waiter)
        self._staged: DeviceCollective = Staged(device, host, waiter)
        self.reach, self._comm = self._connect(topology, waiter, wanted)
        everywhere = self._comm if self.reach == Reach.ALL else None
        self._compressed = DeviceCompressedAllreduce(
            device, topology, recorder, everywhere, self._staged, exact=exact
        )
        self._collectives: dict[OpKind, DeviceCollective] = {}
        self._means: DeviceMeans | None = None
        if self._comm is not None:
            self._means = means = DeviceMeans(
                device=device,
                topology=topology,
                waiter=waiter,
                comm=self._comm,
                world=self._world,
                cross=Channel(topology.cross, waiter),
                buffer_bytes=max(LEAST_BUFFER_BYTES, buffer_bytes),
                exact=exact,
            )
            self._collectives = self._build(means, segment_bytes)

    def execute(self, response: Response, entries: Sequence[Entry]) -> Work | None:
        """Give one response to the device; see `coordinator.executor.Executor`."""
        self._device.use()
        if response.kind == OpKind.ARENA:
            self._make_arena(response, entries[0])
            return None
        region = response.first.region
        if region is not None and region.arena not in self._arenas:
            raise ValueError(f"'{response.first.name}' refers to arena {region.arena}, which does not exist")
        self._device.wait_for([mark for entry in entries for mark in entry.ready or ()])
        layout = self._layouts.get(response)
        job = DeviceJob(response, layout, entries)
        collective = self._collective(response.first)
        start = time.monotonic()
        with torch.no_grad():
            collective(job)
        report: Callable[[float], None] = _not_reported
        if collective is not self._staged:  # Of that the host's data plane reports.
            names, nbytes = layout.names(0, layout.total) or response.names, layout.total * layout.itemsize
            self._recorder.span("pack", names, start, time.monotonic(), nbytes)
            report = partial(self._report, names, nbytes)
        return DeviceWork(self._device, self._device.record(), job.kept, self._check, report)

    def _collective(self, request: Request) -> DeviceCollective:
        if request.codec != "none":
            return self._compressed if self._compressed.serves(request.codec) else self._staged
        if request.op == ReduceOp.ADASUM:
            return self._staged
        return self._collectives.get(request.kind, self._staged)

    def memory(self) -> MemoryReport:
        """What the buffer and the arenas take on the device; on any thread."""
        return MemoryReport(
            device_buffers=0 if self._means is None else self._means.held_bytes,
            device_arenas=sum(arena.nbytes for arena in list(self._arenas.values())),
        )

    def close(self) -> None:
        """End the communicators. Collective; nothing may be under way."""
        self._device.use()
        self._device.synchronize()
        if self._comm is not None:
            self._comm.destroy()
        self._arenas.clear()
        self._layouts = LayoutCache()
        self._collectives.clear()

    def abort(self) -> None:
        """End the communicators, and with them what waits for other ranks on the device.

        NCCL may not come back from that, so it has a thread of its own, for which nobody waits long.
        """
        if self._comm is not None:
            thread = threading.Thread(target=self._comm.abort, name="fusion-nccl-abort", daemon=True)
            thread.start()
            thread.join(ABORT_S)

    def _check(self) -> None:
        if self._comm is not None:
            self._comm.check()

    def _report(self, names: Sequence[str], nbytes: int, seconds: float) -> None:
        now = time.monotonic()
        self._recorder.span("reduce", names, now - seconds, now, nbytes)

    def _make_arena(self, response: Response, entry: Entry) -> None:
        part = response.parts[0]
        error: str | None = None
        memory: torch.Tensor | None = None
        try:
            memory = self._device.zeros(part.nbytes)
        except RuntimeError as failure:  # torch.OutOfMemoryError is one.
            error = (
                f"GPU {self._device.index} has no room for a gradient arena of {part.nbytes} bytes "
                f'(buckets="static"): {failure}'
            )
        self._world.agree(error)
        assert memory is not None
        arena = DeviceArena(self._arenas_made, memory)
        self._arenas_made += 1
        self._arenas[arena.number] = arena
        entry.outputs[part.index] = arena

    # Communicators.

    def _connect(self, topology: Topology, waiter: Waiter, wanted: str) -> tuple[Reach, Communicator | None]:
        """Connect the ranks as far as NCCL reaches. Collective."""
        choice = choose_reach(self._standings(), topology.nodes, wanted)
        if wanted != "auto" and choice.reach != _wanted_reach(wanted, len(topology.nodes)):
            raise FusionError(f'gpu="{wanted}" cannot be had: {choice.obstacle}')
        comm = None
        while choice.reach != Reach.HOST and comm is None:
            ranks = Channel(topology.world if choice.reach == Reach.ALL else topology.node, waiter)
            try:
                comm = Communicator.connect(self._device, ranks, self._world, waiter)
            except FusionError as error:
                if wanted != "auto":
                    raise
                spans_nodes = choice.reach == Reach.ALL and len(topology.nodes) > 1
                choice = Choice(Reach.NODE if spans_nodes else Reach.HOST, str(error))
        if choice.obstacle is not None and topology.rank == 0:
            logger.warning('GPUs are connected by "%s": %s', choice.reach.value, choice.obstacle)
        return choice.reach, comm

    def _standings(self) -> list[Standing]:
        try:
            version = int(self._device.nccl.get_version())
        except Exception:  # noqa: BLE001 - CuPy has no NCCL, and says so in its own way
            version = 0
        gpu = zlib.crc32(self._device.identity.encode())
        may_share = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        rows = self._world.all_gather_ints([version, gpu, int(may_share)])
        return [Standing(int(nccl), int(its_gpu), bool(shares)) for nccl, its_gpu, shares in rows]

    def _build(self, means: DeviceMeans, segment_bytes: int) -> dict[OpKind, DeviceCollective]:
        between = self.reach == Reach.NODE
        collectives: dict[OpKind, DeviceCollective] = {
            OpKind.ALLREDUCE: DeviceAllreduce(means, segment_bytes, between=between)
        }
        if not between:
            collectives |= {
                OpKind.BROADCAST: DeviceBroadcast(means),
                OpKind.ALLGATHER: DeviceAllgather(means),
                OpKind.ALLTOALL: DeviceAlltoall(means),
                OpKind.REDUCESCATTER: DeviceReducescatter(means),
            }
        return collectives


def _not_reported(_: float) -> None:
    """For an operation whose time is reported elsewhere."""


def _wanted_reach(wanted: str, nodes: int) -> Reach:
    """On one node, hierarchical is NCCL over all ranks."""
    return Reach.ALL if wanted == "hierarchical" and nodes == 1 else Reach(wanted)
