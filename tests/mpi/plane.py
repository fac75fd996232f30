"""The data plane without a control plane: single collectives on a chosen arrangement of nodes and devices.

The arrangements of devices use a double of a GPU, or with FUSION_TEST_GPU=1 the real one: tests hand
over tensors in host memory, which then travel to the device and back around each collective.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from mpi4py import MPI

from coordinator.executor import Entry, Work
from coordinator.handle import Bell, Handle
from coordinator.messages import ANY, OpKind, Part, ReduceOp, Request, Response
from coordinator.recorder import PHASES
from coordinator.waiting import Waiter
from fusion.devices import Devices
from fusion.dtypes import name_of
from fusion.executor import CpuExecutor
from fusion.topology import Topology
from fusion.tuning.space import Space

ARRANGEMENTS = {
    "one node": lambda rank: 0,
    "a node each": lambda rank: rank,
    "first alone": lambda rank: min(rank, 1),
    "pairs": lambda rank: rank // 2,
    "ring of all": lambda rank: rank // 2,
}
"""Node of a rank, by name of the arrangement; the last one runs with `hierarchy` off."""

REAL_GPU = os.environ.get("FUSION_TEST_GPU") == "1"
DEVICE_ARRANGEMENTS = {
    "device": ("nccl", lambda rank: 0),
    "device, pairs": ("hierarchical", lambda rank: rank // 2),
    "device, first alone": ("hierarchical", lambda rank: min(rank, 1)),
    "device, through the host": ("host", lambda rank: 0),
}
"""The same for tensors on devices, with the setting `gpu`."""
DEVICE_RANKS = {
    "device": (1, 2),
    "device, pairs": (4,),
    "device, first alone": (3,),
    "device, through the host": (2,),
}
"""Numbers of ranks at which each is worth its time."""
EVERYWHERE = list(DEVICE_ARRANGEMENTS) if REAL_GPU else [*ARRANGEMENTS, *DEVICE_ARRANGEMENTS]


@dataclass
class Settings:
    """Small enough that every size below needs several chunks, segments and buffers."""

    fusion_threshold_mb: float = 0.03125
    chunk_kb: int = 8
    ring_segment_kb: int = 1
    hierarchy: str = "auto"
    gpu: str = "auto"
    gpu_sums: str = "float32"


class Spans:
    """A recorder that keeps what it is told."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, tuple[str, ...], int]] = []

    def span(self, phase: str, names: Sequence[str], start: float, stop: float, nbytes: int) -> None:
        assert start <= stop and phase in PHASES
        self.seen.append((phase, tuple(names), nbytes))

    def compressed(self, nbytes: int, payload: int) -> None:
        self.seen.append(("compressed", (), payload))


class Plane:
    """An executor of its own, and one call for each collective.

    Attributes:
        arrangement: its name.
        on_device: tensors travel to a device for each collective.
        gpu: the double, if it is one.
    """

    def __init__(
        self, arrangement: str, settings: Settings | None = None, space: Space | None = None
    ) -> None:
        settings = settings or Settings()
        if arrangement == "ring of all":
            settings.hierarchy = "off"
        self.arrangement = arrangement
        self.on_device = arrangement in DEVICE_ARRANGEMENTS
        if self.on_device:
            settings.gpu, node_of = DEVICE_ARRANGEMENTS[arrangement]
        else:
            node_of = ARRANGEMENTS[arrangement]
        self.topology = Topology.create(MPI.COMM_WORLD, node_of=node_of)
        self.rank, self.size = self.topology.rank, self.topology.size
        self.spans = Spans()
        self.waiter = Waiter(lambda: None)
        self.host = CpuExecutor(self.topology, self.waiter, self.spans, settings, space)
        self.gpu: Any = None
        self.executor: Any = self.host
        if self.on_device:
            self.executor = self._devices(settings)

    def close(self) -> None:
        self.executor.close()

    def _devices(self, settings: Settings) -> Devices:
        if REAL_GPU:
            return Devices(self.host, self.topology, self.waiter, self.spans, settings)
        from tests.gpu.doubles import Gpu

        # A device each, as NCCL wants it.
        self.gpu = Gpu(index=self.rank)
        return Devices(
            self.host,
            self.topology,
            self.waiter,
            self.spans,
            settings,
            load=lambda: self.gpu.modules,
            lacking=lambda: None,
        )

    def allreduce(
        self,
        tensors: Sequence[torch.Tensor],
        op: ReduceOp = ReduceOp.SUM,
        *,
        in_place: bool = False,
        **options: Any,
    ) -> list[torch.Tensor]:
        """Reduce tensors of one dtype as one response."""
        outputs = list(tensors) if in_place else [torch.empty_like(tensor) for tensor in tensors]
        entries = [
            entry(self._request(OpKind.ALLREDUCE, tensor, name=f"t{index}", op=op, **options), tensor, output)
            for index, (tensor, output) in enumerate(zip(tensors, outputs, strict=True))
        ]
        self.execute(entries)
        return outputs

    def one(
        self,
        kind: OpKind,
        tensor: torch.Tensor,
        output: torch.Tensor | None = None,
        extra: Any = None,
        **options: Any,
    ) -> list[Any]:
        """Run any other collective; its outputs."""
        made = entry(self._request(kind, tensor, **options), tensor, output, extra)
        self.execute([made])
        return made.outputs

    def begin(self, entries: Sequence[Entry]) -> Work | None:
        """Begin a response of tensors in host memory; what is then under way, if anything."""
        return self.host.execute(self.response_of(entries), entries)

    def execute(self, entries: Sequence[Entry], response: Response | None = None) -> None:
        """Run entries as one response, to its end; `response` is what they were before."""
        on_device = self.on_device and entries[0].request.kind != OpKind.BARRIER
        trips = [_Trip(each) for each in entries] if on_device and REAL_GPU else []
        if on_device:
            for each in entries:
                each.ready = each.ready or self.executor.mark(each.inputs, each.request.name)
        work = self.executor.execute(response or self.response_of(entries), entries)
        if work is not None:
            self.waiter.until(work.done)
        for trip in trips:
            trip.back()

    def response_of(self, entries: Sequence[Entry]) -> Response:
        """What the planner makes of entries with one tensor each, of one dtype."""
        requests = [self.request(each.request) for each in entries]
        first = requests[0]
        return Response(first.kind, first.dtypes[0], tuple(Part(request, 0) for request in requests))

    def request(self, request: Request) -> Request:
        """The same for the tensors of this plane."""
        if self.on_device and request.kind != OpKind.BARRIER:
            return msgspec.structs.replace(request, device="cuda")
        return request

    def _request(self, kind: OpKind, tensor: torch.Tensor, *, name: str = "t", **options: Any) -> Request:
        free = kind in (OpKind.ALLGATHER, OpKind.ALLTOALL)
        shape = (ANY, *tensor.shape[1:]) if free else tuple(tensor.shape)
        return self.request(Request(name, kind, (name_of(tensor.dtype),), (shape,), **options))


def entry(request: Request, tensor: torch.Tensor, output: Any, extra: Any = None) -> Entry:
    handle = Handle(request.name, Bell())
    return Entry(request, [tensor], [output], handle, enqueued_at=time.monotonic(), extra=extra)


class _Trip:
    """An entry's tensors on their way to the real device and back; strides stay what they are."""

    def __init__(self, made: Entry) -> None:
        self._made = made
        self._outputs = list(made.outputs or ())
        moved = {id(tensor): self._there(tensor) for tensor in (*made.inputs, *self._outputs)}
        made.inputs = [moved[id(tensor)] for tensor in made.inputs]
        made.outputs = [moved[id(tensor)] for tensor in self._outputs]

    def back(self) -> None:
        """Bring outputs to where the test looks for them."""
        for index, output in enumerate(self._made.outputs):
            original = self._outputs[index] if index < len(self._outputs) else None
            if original is not None and not original.is_cuda:
                original.detach().copy_(output)
                self._made.outputs[index] = original
            elif original is None and isinstance(output, torch.Tensor):
                self._made.outputs[index] = output.cpu()

    @staticmethod
    def _there(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None or tensor.is_cuda:
            return tensor
        plain = tensor.detach()
        whole = torch.empty(0, dtype=plain.dtype).set_(plain.untyped_storage()).cuda()
        return whole.as_strided(plain.shape, plain.stride(), plain.storage_offset())


def digest(*tensors: torch.Tensor) -> str:
    """Of the bits of tensors."""
    summary = hashlib.sha256()
    for tensor in tensors:
        summary.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return summary.hexdigest()


def assert_same_bits(*tensors: torch.Tensor) -> None:
    """Every rank has the same bits. Collective."""
    assert len(set(MPI.COMM_WORLD.allgather(digest(*tensors)))) == 1


def draw(rank: int, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """What a rank puts in: any rank can say what another one has."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    low, high = (0, 20) if dtype == torch.uint8 else (-20, 20)
    return torch.randint(low, high, shape, generator=generator).to(dtype)
