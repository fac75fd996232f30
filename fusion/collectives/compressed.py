"""All-reduce of a bucket by a compressor: only what the compressor makes of it is moved.

The tensors of a response are laid into one flat float32 bucket, which the compressor of the
request's codec reduces. What it adds up rides the all-reduce of this package that would serve so
many elements, what it gathers rides the all-gather; so inside a node payloads go through shared
memory, and between nodes nothing but payloads crosses. Between nodes 16-bit values are exchanged
directly, since the ring would widen them.

Cost beside the compressor's own: one pass over the bucket to pack and one to unpack, two to look
for infinities, one to add what is remembered.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from coordinator.executor import Entry
from coordinator.messages import ANY, OpKind, Part, ReduceOp, Request, Response
from fusion.collectives.job import Collective, Job, Means
from fusion.compression.base import BucketInfo, Key
from fusion.compression.exchange import Seeds, exchange
from fusion.compression.feedback import Ledger
from fusion.compression.registry import parse
from fusion.dtypes import name_of
from fusion.packing import Layout


class CompressedAllreduce:
    """See the module.

    `Entry.extra` is None or a mapping from the response's dtype to a `Ledger`.

    Args:
        means: for reporting, and to know this rank.
        plain: runs an all-reduce or an all-gather that is not compressed.
    """

    def __init__(self, means: Means, plain: Collective) -> None:
        self._means = means
        self._plain = plain
        self._seeds = Seeds()

    def __call__(self, job: Job) -> None:
        request, topology = job.response.first, self._means.topology
        compressor = parse(request.codec)
        seed = self._seeds.next(f"{job.name}.{job.response.dtype}")
        ledger: Ledger | None = (job.entries[0].extra or {}).get(job.response.dtype)
        transport = _Transport(self._means, self._plain, job)
        info = bucket_info(job.layout)
        bucket = torch.empty(info.count) if ledger is None else ledger.buffer()
        torch._foreach_copy_(bucket_parts(bucket, info), job.tensors.inputs)
        if request.prescale != 1.0:
            bucket.mul_(request.prescale)
        mean = exchange(compressor, bucket, info, Key(seed, topology.rank), transport, ledger=ledger)
        scale = request.postscale * (topology.size if request.op == ReduceOp.SUM else 1)
        if scale != 1.0:
            mean.mul_(scale)
        torch._foreach_copy_(job.tensors.outputs, bucket_parts(mean, info))
        transport.mark("unpack")
        self._means.recorder.compressed(job.response.nbytes, transport.payload)


class _Transport:
    """Implements `fusion.compression.Transport` by the collectives of this package.

    Attributes:
        payload: bytes that this rank has contributed.
    """

    def __init__(self, means: Means, plain: Collective, job: Job) -> None:
        self._means = means
        self._plain = plain
        self._job = job
        self._since = time.monotonic()
        self.payload = 0

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        self.payload += values.nbytes
        if values.element_size() == 2 and len(self._means.topology.nodes) > 1:
            return self._mean_of_narrow(values)
        output = torch.empty_like(values)
        self._run(OpKind.ALLREDUCE, values, [output])
        return output

    def gather(self, payload: torch.Tensor) -> Sequence[torch.Tensor]:
        self.payload += payload.nbytes
        return self._run(OpKind.ALLGATHER, payload, [None]).split(len(payload))

    def _mean_of_narrow(self, values: torch.Tensor) -> torch.Tensor:
        """The mean of 16-bit values with nothing wider on the wire.

        A ring passes partial sums on, which are float32 so that they are rounded once; here every rank
        gets all ranks' values of its share instead, and sends its share of the mean to all.
        """
        size = self._means.topology.size
        share = -(-len(values) // size)
        whole = values.new_zeros(share * size)
        whole[: len(values)] = values
        received = self._run(OpKind.ALLTOALL, whole, [None]).view(size, share)
        mean = received.to(torch.float32).sum(0).div_(size).to(values.dtype)
        return self._run(OpKind.ALLGATHER, mean, [None])[: len(values)]

    def mark(self, phase: str) -> None:
        """What happened since the last time was this phase."""
        now = time.monotonic()
        self._means.recorder.span(phase, (self._job.name,), self._since, now, self._job.response.nbytes)
        self._since = now

    def _run(self, kind: OpKind, values: torch.Tensor, outputs: list[torch.Tensor | None]) -> torch.Tensor:
        self.mark("pack")
        response, layout = self._plan(kind, name_of(values.dtype), len(values))
        entry = Entry(response.first, [values], outputs, self._job.entries[0].handle, self._since)
        self._plain(Job(response, layout, [entry]))
        self._since = time.monotonic()
        output = outputs[0]
        assert output is not None
        return output

    def _plan(self, kind: OpKind, dtype: str, count: int) -> tuple[Response, Layout]:
        """The same each time this bucket is sent, so made once."""
        key = ("compressed", kind, dtype, count)
        plan: tuple[Response, Layout] | None = self._job.layout.kept.get(key)
        if plan is None:
            shape = (count,) if kind == OpKind.ALLREDUCE else (ANY,)
            request = Request(self._job.name, kind, (dtype,), (shape,), op=ReduceOp.AVERAGE)
            response = Response(kind, dtype, (Part(request, 0),))
            plan = self._job.layout.kept[key] = response, Layout(response)
        return plan


def bucket_info(layout: Layout) -> BucketInfo:
    """What lies in the bucket of a response."""
    info: BucketInfo | None = layout.kept.get("bucket")
    if info is None:
        parts = layout.response.parts
        info = BucketInfo.of((f"{part.request.name}.{part.index}", part.shape) for part in parts)
        layout.kept["bucket"] = info
    return info


def bucket_parts(bucket: torch.Tensor, info: BucketInfo) -> list[torch.Tensor]:
    """Each tensor in a bucket, as a view."""
    return [piece.of(bucket).view(piece.shape) for piece in info.pieces]
