"""Broadcast, all-gather, all-to-all and reduce-scatter on devices, by NCCL over all ranks.

How many rows other ranks have is asked by MPI, while the device still works on
what came before. Costs on the host: one message of a few words for the counts,
where they may differ, and the launches; on the device: what NCCL needs, and for a
reduce-scatter whose blocks differ, or whose values change their form on the way,
the copies to and from the buffer.
"""

from __future__ import annotations

from itertools import accumulate
from math import prod

import torch

from fusion.collectives.alltoall import bounds, check_splits, splits_of
from fusion.collectives.device_job import DeviceJob, DeviceMeans
from fusion.collectives.reducescatter import rows_of
from fusion.cuda.copying import OnDevice, Table
from fusion.cuda.plan import block_pieces, stretch_chunks
from fusion.cuda.rules import Rules

_BYTES = "uint8"


class DeviceBroadcast:
    """Every rank gets the values of the root."""

    def __init__(self, means: DeviceMeans) -> None:
        self._means = means

    def __call__(self, job: DeviceJob) -> None:
        device, root = self._means.device, job.response.first.root_rank
        nbytes = job.layout.total * job.layout.itemsize
        if not nbytes:
            return
        (target,) = job.targets(device)
        # Only the root's input is read.
        is_root = self._means.comm.rank == root
        source = job.sources(device)[0] if is_root else target
        self._means.comm.broadcast(source.data_ptr(), target.data_ptr(), nbytes, _BYTES, root)
        if not (is_root and job.in_place):
            job.flush(device)


class DeviceAllgather:
    """Every rank gets the rows of all ranks, in rank order; first dimensions may differ."""

    def __init__(self, means: DeviceMeans) -> None:
        self._means = means

    def __call__(self, job: DeviceJob) -> None:
        means, (source,) = self._means, job.sources(self._means.device)
        rows = [int(count) for count in means.world.all_gather_ints([source.shape[0]])[:, 0]]
        row_bytes = prod(source.shape[1:]) * source.element_size()
        output = job.new_output(means.device, (sum(rows), *source.shape[1:]), source.dtype)
        target = output.data_ptr()
        if not sum(rows) * row_bytes:
            pass
        elif len(set(rows)) == 1:
            means.comm.all_gather(source.data_ptr(), target, rows[0] * row_bytes, _BYTES)
        else:
            with means.comm.group():
                for rank, (lo, hi) in enumerate(bounds([count * row_bytes for count in rows])):
                    if lo < hi:
                        mine = source.data_ptr() if rank == means.comm.rank else target + lo
                        means.comm.broadcast(mine, target + lo, hi - lo, _BYTES, rank)
        job.set_output(means.device, output)


class DeviceAlltoall:
    """Every rank sends some of its rows to each rank; see `fusion.collectives.alltoall`."""

    def __init__(self, means: DeviceMeans) -> None:
        self._means = means

    def __call__(self, job: DeviceJob) -> None:
        means, (source,) = self._means, job.sources(self._means.device)
        rank, size = means.comm.rank, means.comm.size
        matrix = means.world.all_gather_ints(splits_of(job.entries[0].extra, source.shape[0], size))
        check_splits(job.name, matrix)
        received = matrix[:, rank]
        row_bytes = prod(source.shape[1:]) * source.element_size()
        output = job.new_output(means.device, (int(received.sum()), *source.shape[1:]), source.dtype)
        with means.comm.group():
            for other, (lo, hi) in enumerate(bounds(matrix[rank] * row_bytes)):
                if lo < hi:
                    means.comm.send(source.data_ptr() + lo, hi - lo, _BYTES, other)
            for other, (lo, hi) in enumerate(bounds(received * row_bytes)):
                if lo < hi:
                    means.comm.receive(output.data_ptr() + lo, hi - lo, _BYTES, other)
        job.set_output(means.device, output)
        job.entries[0].outputs.append(torch.from_numpy(received.copy()))


class DeviceReducescatter:
    """Each rank gets its rows of the reduced tensor, the first rows % size ranks one more."""

    def __init__(self, means: DeviceMeans) -> None:
        self._means = means

    def __call__(self, job: DeviceJob) -> None:
        means, (source,) = self._means, job.sources(self._means.device)
        rules = means.rules(job.response)
        if source.dim() == 0:
            raise ValueError(f"reduce-scatter '{job.name}' needs a tensor with a first dimension to scatter")
        rows = rows_of(source.shape[0], means.comm.size)
        row = source.numel() // max(1, source.shape[0])
        ends = list(accumulate(count * row for count in rows))
        blocks = list(zip([0, *ends[:-1]], ends, strict=True))
        output = job.new_output(means.device, (rows[means.comm.rank], *source.shape[1:]), source.dtype)
        if source.numel():
            if len(set(rows)) == 1 and rules.plain and not rules.finishes and rules.prescale == 1.0:
                means.comm.reduce_scatter(
                    source.data_ptr(), output.data_ptr(), output.numel(), rules.buffer_dtype, rules.reduction
                )
            else:
                self._packed(job, rules, source, output, blocks)
        job.set_output(means.device, output)

    def _packed(
        self,
        job: DeviceJob,
        rules: Rules,
        source: torch.Tensor,
        output: torch.Tensor,
        blocks: list[tuple[int, int]],
    ) -> None:
        means, device, buffer = self._means, self._means.device, self._means.buffer
        rank, copier = means.comm.rank, means.copier(rules)
        reading, writing = Table(device, 1), Table(device, 1)
        for piece, room, at in block_pieces(blocks, means.buffer_bytes // rules.itemsize):
            copier.pack(reading.of([source], job.kept), OnDevice(device, piece.chunks, job.kept), buffer)
            mine = buffer + rank * room * rules.itemsize
            means.comm.reduce_scatter(buffer, mine, room, rules.buffer_dtype, rules.reduction)
            count = min(room, len(output.view(-1)) - at)
            if count > 0:
                chunks = OnDevice(device, stretch_chunks(at, count), job.kept)
                copier.unpack(writing.of([output], job.kept), chunks, mine)
