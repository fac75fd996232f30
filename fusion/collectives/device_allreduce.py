"""All-reduce on devices: pack, reduce and unpack on the side stream, with NCCL between.

What NCCL does not reach goes through MPI: the ranks of a node reduce-scatter
with NCCL, each rank takes its part to the host and rings it with its
counterparts on the other nodes, and the node gathers the result. Nodes with
different numbers of ranks reduce to their first rank instead, which rings alone.

A response of one tensor whose type NCCL can sum as it is travels without the
buffer: from the input straight to the output.

Cost for S bytes on the host: three launches for each piece of a buffer, and a
table of addresses if tensors have moved. On the device: S read and written
packing, and again unpacking, twice that for 16-bit floats in the buffer; what
NCCL needs for the reduction. Between N nodes of k ranks: 2 S/k (N-1)/N bytes
sent and received by a rank, and S/k copied to the host and back.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from coordinator.messages import ITEM_SIZE
from fusion.arithmetic import Arithmetic, Scratch
from fusion.collectives.between import Between
from fusion.collectives.device_job import DeviceJob, DeviceMeans
from fusion.cuda.copying import Copier, OnDevice, Table
from fusion.cuda.plan import aligned, pieces_of, stretch_chunks
from fusion.cuda.rules import Rules
from fusion.dtypes import to_torch
from fusion.packing import Layout


class _Plan(msgspec.Struct, frozen=True):
    """What is the same for every execution of a response."""

    rules: Rules
    copier: Copier
    pieces: list[tuple[OnDevice, int]]
    """The chunks and the elements of the buffer in use, for each piece; one for a straight plan."""
    sources: Table
    targets: Table
    straight: bool


class DeviceAllreduce:
    """See the module.

    Args:
        means: to work with.
        between: there are ranks that NCCL does not reach.
    """

    def __init__(self, means: DeviceMeans, segment_bytes: int, *, between: bool) -> None:
        self._means = means
        self._device = means.device
        self._between = _Between(means, segment_bytes) if between else None

    def __call__(self, job: DeviceJob) -> None:
        plan = self._plan(job)
        sources = job.sources(self._device)
        targets = sources if sources is job.inputs and job.in_place else job.targets(self._device)
        if plan.straight:
            self._straight(job, plan, sources, targets)
        else:
            self._packed(job, plan, sources, targets)
        job.flush(self._device)

    def _packed(
        self, job: DeviceJob, plan: _Plan, sources: list[torch.Tensor], targets: list[torch.Tensor]
    ) -> None:
        buffer = self._means.buffer
        reading = plan.sources.of(sources, job.kept)
        writing = reading if targets is sources else plan.targets.of(targets, job.kept)
        for chunks, count in plan.pieces:
            plan.copier.pack(reading, chunks, buffer)
            self._reduce(buffer, buffer, count, plan.rules)
            plan.copier.unpack(writing, chunks, buffer)

    def _straight(
        self, job: DeviceJob, plan: _Plan, sources: list[torch.Tensor], targets: list[torch.Tensor]
    ) -> None:
        if not job.layout.total:
            return
        source, target = sources[0].data_ptr(), targets[0].data_ptr()
        ((chunks, count),) = plan.pieces
        if plan.rules.prescale != 1.0:
            plan.copier.pack(plan.sources.of(sources, job.kept), chunks, target)
            source = target
        self._reduce(source, target, count, plan.rules)
        if plan.rules.finishes:
            plan.copier.unpack(plan.targets.of(targets, job.kept), chunks, target)

    def _reduce(self, source: int, target: int, count: int, rules: Rules) -> None:
        if self._between is not None:
            self._between.reduce(target, count, rules)
        else:
            self._means.comm.all_reduce(source, target, count, rules.buffer_dtype, rules.reduction)

    def _plan(self, job: DeviceJob) -> _Plan:
        plan: _Plan | None = job.layout.kept.get("device")
        if plan is None:
            plan = job.layout.kept["device"] = self._make(job.layout, job.kept)
        return plan

    def _make(self, layout: Layout, kept: list[Any]) -> _Plan:
        rules = self._means.rules(layout.response)
        # Between nodes parts are padded, which an output has no room for.
        straight = rules.plain and len(layout.counts) == 1 and self._between is None
        if straight:
            ranges = [(stretch_chunks(0, layout.total), layout.total)]
        else:
            capacity = self._means.buffer_bytes // rules.itemsize
            if self._between is not None:
                capacity = capacity // self._between.quantum * self._between.quantum
            ranges = [(piece.chunks, piece.count) for piece in pieces_of(layout.counts, capacity)]
        return _Plan(
            rules,
            self._means.copier(rules),
            [(OnDevice(self._device, chunks, kept), count) for chunks, count in ranges],
            Table(self._device, len(layout.counts)),
            Table(self._device, len(layout.counts)),
            straight,
        )


class _Between:
    """NCCL inside the node and MPI between nodes."""

    def __init__(self, means: DeviceMeans, segment_bytes: int) -> None:
        self._means = means
        self._device = means.device
        self._comm = means.comm
        self._even = len({len(ranks) for ranks in means.topology.nodes}) == 1
        self._cross = Between(means.cross, segment_bytes)
        self._scratch = Scratch()
        self._host: torch.Tensor | None = None
        self.quantum = aligned(1) * means.topology.local_size
        """Pieces of the buffer are multiples of this, so that every rank's part is aligned."""

    def reduce(self, buffer: int, count: int, rules: Rules) -> None:
        """Reduce the first `count` elements of the buffer, in place; the rest of a quantum is overwritten."""
        comm, itemsize = self._comm, ITEM_SIZE[rules.buffer_dtype]
        if not self._even:
            comm.reduce(buffer, count, rules.buffer_dtype, rules.reduction)
            if comm.rank == 0:
                self._cross_part(buffer, count, rules)
            comm.broadcast(buffer, buffer, count, rules.buffer_dtype, 0)
            return
        part = -(-count // self.quantum) * self.quantum // comm.size
        mine = buffer + comm.rank * part * itemsize
        comm.reduce_scatter(buffer, mine, part, rules.buffer_dtype, rules.reduction)
        self._cross_part(mine, part, rules)
        comm.all_gather(mine, buffer, part, rules.buffer_dtype)

    def _cross_part(self, address: int, count: int, rules: Rules) -> None:
        """Take a part to the host, which must wait for it, reduce it between nodes, and take it back."""
        nbytes = count * ITEM_SIZE[rules.buffer_dtype]
        if self._host is None or len(self._host) < nbytes:
            self._host = self._device.pinned(nbytes)
        host = self._host[:nbytes]
        self._device.copy(host.data_ptr(), address, nbytes)
        event = self._device.record()
        self._means.waiter.until(lambda: self._device.passed(event))
        arithmetic = Arithmetic(
            rules.reduction,
            rules.buffer_dtype,
            self._cross.size,
            prescale=1.0,
            postscale=1.0,
            scratch=self._scratch,
        )
        out = host.view(to_torch(rules.buffer_dtype))
        partial = out
        if arithmetic.widens:
            partial = self._scratch.take(arithmetic.accumulator, count, "partial")
            arithmetic.accumulate([out], partial)
        self._cross.all_reduce(partial, out, arithmetic)
        self._device.copy(address, host.data_ptr(), nbytes)
