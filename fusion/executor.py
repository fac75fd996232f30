"""The data plane on CPUs: runs the responses that the control plane agreed on.

Built by `fusion.runtime.init` on the thread that calls it; after that used on
the cycle thread only. It owns the fusion buffers and the arenas.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Protocol

import torch

from coordinator.executor import Entry, Work
from coordinator.handle import Handle
from coordinator.messages import OpKind, Request, Response
from coordinator.waiting import Waiter
from fusion.absent import absent_entry
from fusion.arena import Arena
from fusion.arithmetic import Scratch
from fusion.channel import Channel
from fusion.collectives.adasum import AdasumAllreduce
from fusion.collectives.allgather import Allgather
from fusion.collectives.alltoall import Alltoall
from fusion.collectives.barrier import Barrier
from fusion.collectives.broadcast import Broadcast
from fusion.collectives.chooser import Algorithm, choose
from fusion.collectives.compressed import CompressedAllreduce
from fusion.collectives.hierarchical import HierarchicalAllreduce, vector_bytes
from fusion.collectives.in_place import InPlaceAllreduce
from fusion.collectives.job import Collective, Job, Means, Recorder
from fusion.collectives.node import ALIGN, NodeBuffer
from fusion.collectives.pipeline import Operation, Pipeline
from fusion.collectives.reducescatter import Reducescatter
from fusion.collectives.shared import SharedAllreduce
from fusion.memory import LEAST_BUFFER_BYTES, MemoryReport
from fusion.packing import LayoutCache
from fusion.threads import use_one_thread
from fusion.topology import Topology


class DataPlaneConfig(Protocol):
    """The settings the data plane reads; `fusion.config.Config` has them."""

    @property
    def fusion_threshold_mb(self) -> float: ...
    @property
    def chunk_kb(self) -> int: ...
    @property
    def ring_segment_kb(self) -> int: ...
    @property
    def hierarchy(self) -> str: ...


class Room(Protocol):
    """What settings `CpuExecutor.retune` may be given later, so that memory is made for them at the start."""

    @property
    def fusion_threshold_mb(self) -> float:
        """The largest."""
        ...

    @property
    def chunks_kb(self) -> Sequence[int]: ...
    @property
    def flat(self) -> bool:
        """Whether `hierarchy` may become "off"."""
        ...


class CpuExecutor:
    """Implements `coordinator.executor.Executor` for tensors in host memory.

    Collective: every rank of the topology makes one at the same point.

    Args:
        topology: the ranks.
        waiter: for every wait.
        recorder: told of phases.
        config: the settings.
        room: settings that may come later; default none but `config`.

    Raises:
        FusionError: there is not enough shared memory on some node; alike on all ranks.
    """

    def __init__(
        self,
        topology: Topology,
        waiter: Waiter,
        recorder: Recorder,
        config: DataPlaneConfig,
        room: Room | None = None,
    ) -> None:
        self._topology = topology
        self._arenas: dict[int, Arena] = {}
        self._arenas_made = 0
        self._thread = 0
        chunks = [_chunk_bytes(kb) for kb in {config.chunk_kb, *(room.chunks_kb if room else ())}]
        threshold = max(config.fusion_threshold_mb, room.fusion_threshold_mb if room else 0.0)
        buffer = max(LEAST_BUFFER_BYTES, int(threshold * (1 << 20)), *chunks)
        world, node_channel = Channel(topology.world, waiter), Channel(topology.node, waiter)
        always_flat = topology.size > 1 and config.hierarchy == "off" and room is None
        flat = topology.size > 1 and (config.hierarchy == "off" or (room is not None and room.flat))
        vector = 0
        if len(topology.nodes) > 1 and not always_flat:
            vector = max(vector_bytes(buffer, chunk, topology.slices) for chunk in chunks)
        self._means = Means(
            topology=topology,
            waiter=waiter,
            recorder=recorder,
            world=world,
            cross=Channel(topology.cross, waiter),
            node=NodeBuffer.shared(node_channel, world, max(chunks), vector, waiter),
            scratch=Scratch(),
            buffer_bytes=buffer,
            segment_bytes=config.ring_segment_kb * 1024,
            arenas=self._arenas,
            pipeline=Pipeline(waiter),
        )
        self._pipeline = self._means.pipeline
        if len(topology.nodes) > 1:
            self._means.node.meanwhile = self._pipeline.advance
        self._node_channel = node_channel
        self._alone: NodeBuffer | None = None
        if flat:
            vector = max(vector_bytes(buffer, chunk, 1) for chunk in chunks)
            self._alone = NodeBuffer.private(max(chunks), vector, waiter)
        self.retune(config)

    def retune(self, config: DataPlaneConfig) -> None:
        """Use these settings, which there must be room for, from the next response on.

        Between two responses, on every rank alike. No memory that a tensor or a
        message may lie in is made, moved or given back.
        """
        self._pipeline.drain()
        self._hierarchy = config.hierarchy
        for node in filter(None, (self._means.node, self._alone)):
            node.use_chunks_of(_chunk_bytes(config.chunk_kb))
        self._means = dataclasses.replace(self._means, segment_bytes=config.ring_segment_kb * 1024)
        self._layouts = LayoutCache()  # Kept views are of pieces of the size before.
        self._collectives = self._build()

    def execute(self, response: Response, entries: Sequence[Entry]) -> Work | None:
        """Run one response, or leave its ring under way; see `coordinator.executor.Executor`."""
        if self._thread != threading.get_ident():
            self._thread = threading.get_ident()
            use_one_thread()
        if response.kind == OpKind.ARENA:
            self._pipeline.drain()
            self._make_arena(response, entries[0])
            return None
        job = Job(response, self._layouts.get(response), entries)
        with torch.no_grad():  # Inputs and outputs may be parameters; nothing here is differentiated.
            self._run(job)
            if job.last is None:
                return None
            self._pipeline.linger(job.last)
        return None if job.last.done else _Begun(self._pipeline, job.last)

    def _run(self, job: Job) -> None:
        algorithm = choose(
            job.response,
            nodes=len(self._topology.nodes),
            size=self._topology.size,
            hierarchy=self._hierarchy,
        )
        if algorithm not in _LEFT_UNDER_WAY:
            self._pipeline.drain()
        self._collectives[algorithm](job)

    def _run_to_its_end(self, job: Job) -> None:
        self._run(job)
        self._pipeline.drain()

    def absent(self, request: Request, handle: Handle) -> Entry:
        """An entry for a rank that has joined; see `coordinator.executor.Executor`."""
        return absent_entry(request, handle, self._topology.size)

    def memory(self) -> MemoryReport:
        """What this rank's part of the buffers and arenas takes; on any thread."""
        node, alone = self._means.node, self._alone
        return MemoryReport(
            buffers=node.nbytes // node.size + (alone.nbytes if alone else 0),
            arenas=sum(arena.nbytes for arena in list(self._arenas.values())),
            scratch=self._means.scratch.nbytes,
        )

    def close(self) -> None:
        """Let go of buffers and communicators. Memory that tensors refer to stays until they are gone."""
        self._arenas.clear()
        self._layouts = LayoutCache()
        self._collectives.clear()
        self._topology.close()

    def abort(self) -> None:
        """Do nothing: no device waits for other ranks. Memory goes with the process."""

    def _build(self) -> dict[Algorithm, Collective]:
        means = self._means
        collectives: dict[Algorithm, Collective] = {
            Algorithm.SHARED: SharedAllreduce(means),
            Algorithm.IN_PLACE: InPlaceAllreduce(means),
            Algorithm.HIERARCHICAL: HierarchicalAllreduce(
                means, means.node, means.cross, self._topology.slices
            ),
            Algorithm.BROADCAST: Broadcast(means),
            Algorithm.ALLGATHER: Allgather(means),
            Algorithm.ALLTOALL: Alltoall(means),
            Algorithm.REDUCESCATTER: Reducescatter(means),
            Algorithm.BARRIER: Barrier(means),
            Algorithm.ADASUM: AdasumAllreduce(means),
            Algorithm.COMPRESSED: CompressedAllreduce(means, self._run_to_its_end),
        }
        if self._alone is not None:
            collectives[Algorithm.RING] = HierarchicalAllreduce(means, self._alone, means.world, 1)
        return collectives

    def _make_arena(self, response: Response, entry: Entry) -> None:
        part = response.parts[0]
        arena = Arena.create(self._arenas_made, part.nbytes, self._node_channel, self._means.world)
        self._arenas_made += 1
        self._arenas[arena.number] = arena
        entry.outputs[part.index] = arena


_LEFT_UNDER_WAY = (Algorithm.IN_PLACE, Algorithm.HIERARCHICAL, Algorithm.RING)


class _Begun:
    """Implements `coordinator.executor.Work` for a response whose ring is under way."""

    early = False

    def __init__(self, pipeline: Pipeline, last: Operation) -> None:
        self._pipeline = pipeline
        self._last = last

    def done(self) -> bool:
        with torch.no_grad():
            self._pipeline.advance()
        return self._last.done

    def rest(self) -> float:
        return self._pipeline.rest()

    def join(self) -> None:
        raise AssertionError("a ring has no order that a caller could join")

    def abandon(self) -> None:
        """Do nothing: MPI may write to the memory for as long as the process lives."""


def _chunk_bytes(kb: int) -> int:
    return max(1, kb * 1024 // ALIGN) * ALIGN
