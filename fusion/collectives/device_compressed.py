"""All-reduce of a bucket on a device by a compressor: compressed and decoded there, and only payloads moved.

The counterpart of `compressed.py`. Runs the methods of `fusion.cuda.codecs`; for the
others `serves` says no, and they go through the host whole.

Payloads are gathered by NCCL if it connects all ranks, and otherwise copied to the
host, gathered by its data plane, and copied back; for the latter alone the host waits.
16-bit values that NCCL adds are exchanged directly, so that they are summed in float32
with nothing wider on the wire; with `gpu_sums: native` NCCL sums them as they are.

Cost for p ranks, S bytes of a bucket and P of its payload: (p - 1) P received by a
rank, by the host's way P copied down and p P up as well; on the device beside what the
codec needs S read and written to pack, to unpack, and to add what is remembered, 2 S
read to look for infinities and S written, and 3 S to decide what is remembered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from coordinator.executor import Entry
from coordinator.messages import ANY, OpKind, Part, ReduceOp, Request, Response
from fusion.collectives.compressed import bucket_info, bucket_parts
from fusion.collectives.device_job import DeviceCollective, DeviceJob
from fusion.collectives.job import Recorder
from fusion.collectives.nccl import Communicator
from fusion.compression.base import Key, Transport
from fusion.compression.exchange import Reducing, Seeds, exchange_unseen
from fusion.compression.feedback import Ledger
from fusion.cuda.codecs import on_device
from fusion.cuda.compressing import Compressing
from fusion.cuda.device import Device
from fusion.cuda.plan import aligned
from fusion.dtypes import name_of
from fusion.packing import Layout
from fusion.topology import Topology


class DeviceCompressedAllreduce:
    """See the module.

    `Entry.extra` is None or a mapping from the response's dtype to a `Ledger`, whose residuals
    are kept on the device.

    Args:
        device: of the tensors.
        topology: the ranks.
        recorder: told of payloads.
        comm: NCCL between all ranks, or None.
        exact: whether 16-bit floats are summed in float32.
        staged: runs an all-gather through the host.
    """

    def __init__(
        self,
        device: Device,
        topology: Topology,
        recorder: Recorder,
        comm: Communicator | None,
        staged: DeviceCollective,
        *,
        exact: bool,
    ) -> None:
        self._device = device
        self._topology = topology
        self._recorder = recorder
        self._comm = comm
        self._staged = staged
        self._exact = exact
        self._seeds = Seeds()
        self._kernels = Compressing(device)
        self._codecs: dict[str, Reducing | None] = {}

    def serves(self, spec: str) -> bool:
        """Whether this method compresses on the device; the same on all ranks."""
        return self._codec(spec) is not None

    def __call__(self, job: DeviceJob) -> None:
        request, dtype = job.response.first, job.response.dtype
        codec, info = self._codec(request.codec), bucket_info(job.layout)
        assert codec is not None
        key = Key(self._seeds.next(f"{job.name}.{dtype}"), self._topology.rank)
        ledger: Ledger | None = (job.entries[0].extra or {}).get(dtype)
        moved: list[int] = []
        with self._device.on_side():
            if ledger is None:
                bucket = torch.empty(info.count, device=self._device.torch_device)
            else:
                bucket = ledger.buffer(self._empty_for(job))
                # A caller's stream may own them, and they may be replaced before the device has read them.
                job.kept.append([memory.residual for memory in ledger.memories])
            torch._foreach_copy_(bucket_parts(bucket, info), job.inputs)
            if request.prescale != 1.0:
                bucket.mul_(request.prescale)
            mean = exchange_unseen(codec, bucket, info, key, self._transport(job, moved), ledger=ledger)
            scale = request.postscale * (self._topology.size if request.op == ReduceOp.SUM else 1)
            if scale != 1.0:
                mean.mul_(scale)
            torch._foreach_copy_(job.outputs, bucket_parts(mean, info))
        self._recorder.compressed(job.response.nbytes, sum(moved))

    def _codec(self, spec: str) -> Reducing | None:
        if spec not in self._codecs:
            self._codecs[spec] = on_device(spec, self._kernels, adds=self._comm is not None)
        return self._codecs[spec]

    def _empty_for(self, job: DeviceJob) -> Callable[[int], torch.Tensor]:
        """Memory for residuals: used on the side stream, and on the caller's when a step is settled."""
        return lambda count: job.new_output(self._device, (count,), torch.float32)

    def _transport(self, job: DeviceJob, moved: list[int]) -> Transport:
        if self._comm is not None:
            return _ByNccl(self._comm, moved, exact=self._exact)
        return _ThroughHost(self._staged, job, moved)


class _ByNccl:
    """Implements `fusion.compression.Transport` on the side stream, whose memory it uses.

    Args:
        moved: is given the bytes that this rank contributes.
    """

    def __init__(self, comm: Communicator, moved: list[int], *, exact: bool) -> None:
        self._comm = comm
        self._moved = moved
        self._exact = exact

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        self._moved.append(values.nbytes)
        size, dtype = self._comm.size, name_of(values.dtype)
        if self._exact and values.element_size() == 2:
            return self._mean_of_narrow(values)
        mean = values.div(size)
        self._comm.all_reduce(mean.data_ptr(), mean.data_ptr(), len(mean), dtype, ReduceOp.SUM)
        return mean

    def gather(self, payload: torch.Tensor) -> Sequence[torch.Tensor]:
        self._moved.append(payload.nbytes)
        return self._all(payload).split(len(payload))

    def _mean_of_narrow(self, values: torch.Tensor) -> torch.Tensor:
        """Every rank gets all ranks' values of its share, and sends its share of the mean to all."""
        size, dtype = self._comm.size, name_of(values.dtype)
        share = aligned(-(-len(values) // size))
        whole = values.new_zeros(size, share)
        whole.view(-1)[: len(values)] = values
        received = torch.empty_like(whole)
        with self._comm.group():
            for rank in range(size):
                self._comm.send(whole[rank].data_ptr(), share, dtype, rank)
                self._comm.receive(received[rank].data_ptr(), share, dtype, rank)
        total = received.to(torch.float32).sum(0)
        mean = total.div_(total.new_full((), size)).to(values.dtype)
        return self._all(mean)[: len(values)]

    def _all(self, mine: torch.Tensor) -> torch.Tensor:
        everyones = mine.new_empty(self._comm.size * len(mine))
        self._comm.all_gather(mine.data_ptr(), everyones.data_ptr(), len(mine), name_of(mine.dtype))
        return everyones


class _ThroughHost:
    """Implements `fusion.compression.Transport` for methods that gather, by the host's all-gather."""

    def __init__(self, staged: DeviceCollective, job: DeviceJob, moved: list[int]) -> None:
        self._staged = staged
        self._job = job
        self._moved = moved

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("methods that add up are compressed by the host where NCCL does not reach")

    def gather(self, payload: torch.Tensor) -> Sequence[torch.Tensor]:
        self._moved.append(payload.nbytes)
        response, layout = self._plan()
        outputs: list[Any] = [None]
        entry = Entry(response.first, [payload], outputs, self._job.entries[0].handle, time.monotonic())
        inner = DeviceJob(response, layout, [entry])
        self._staged(inner)
        self._job.kept.append(inner.kept)
        gathered: torch.Tensor = outputs[0]
        return gathered.split(len(payload))

    def _plan(self) -> tuple[Response, Layout]:
        """An all-gather; the same each time this bucket is sent, so made once."""
        plan: tuple[Response, Layout] | None = self._job.layout.kept.get("payloads")
        if plan is None:
            request = Request(self._job.name, OpKind.ALLGATHER, ("uint8",), ((ANY,),))
            response = Response(OpKind.ALLGATHER, "uint8", (Part(request, 0),))
            plan = self._job.layout.kept["payloads"] = response, Layout(response)
        return plan
