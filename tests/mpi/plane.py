"""The data plane without a control plane: single collectives on a chosen arrangement of nodes."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from mpi4py import MPI

from coordinator.executor import Entry
from coordinator.handle import Bell, Handle
from coordinator.messages import ANY, OpKind, Part, ReduceOp, Request, Response
from coordinator.waiting import Waiter
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


@dataclass
class Settings:
    """Small enough that every size below needs several chunks, segments and buffers."""

    fusion_threshold_mb: float = 0.03125
    chunk_kb: int = 8
    ring_segment_kb: int = 1
    hierarchy: str = "auto"


class Spans:
    """A recorder that keeps what it is told."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, tuple[str, ...], int]] = []

    def span(self, phase: str, names: Sequence[str], start: float, stop: float, nbytes: int) -> None:
        assert start <= stop
        self.seen.append((phase, tuple(names), nbytes))

    def compressed(self, nbytes: int, payload: int) -> None:
        self.seen.append(("compressed", (), payload))


class Plane:
    """An executor of its own, and one call for each collective."""

    def __init__(
        self, arrangement: str, settings: Settings | None = None, space: Space | None = None
    ) -> None:
        settings = settings or Settings()
        if arrangement == "ring of all":
            settings.hierarchy = "off"
        self.topology = Topology.create(MPI.COMM_WORLD, node_of=ARRANGEMENTS[arrangement])
        self.rank, self.size = self.topology.rank, self.topology.size
        self.spans = Spans()
        self.executor = CpuExecutor(self.topology, Waiter(lambda: None), self.spans, settings, space)

    def close(self) -> None:
        self.executor.close()

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
            entry(_request(OpKind.ALLREDUCE, tensor, name=f"t{index}", op=op, **options), tensor, output)
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
        made = entry(_request(kind, tensor, **options), tensor, output, extra)
        self.execute([made])
        return made.outputs

    def execute(self, entries: Sequence[Entry]) -> None:
        self.executor.execute(response_of(entries), entries)


def entry(request: Request, tensor: torch.Tensor, output: Any, extra: Any = None) -> Entry:
    handle = Handle(request.name, Bell())
    return Entry(request, [tensor], [output], handle, enqueued_at=time.monotonic(), extra=extra)


def response_of(entries: Sequence[Entry]) -> Response:
    """What the planner makes of entries with one tensor each, of one dtype."""
    request = entries[0].request
    return Response(request.kind, request.dtypes[0], tuple(Part(entry.request, 0) for entry in entries))


def _request(kind: OpKind, tensor: torch.Tensor, *, name: str = "t", **options: Any) -> Request:
    free = kind in (OpKind.ALLGATHER, OpKind.ALLTOALL)
    shape = (ANY, *tensor.shape[1:]) if free else tuple(tensor.shape)
    return Request(name, kind, (name_of(tensor.dtype),), (shape,), **options)


def digest(*tensors: torch.Tensor) -> str:
    """Of the bits of tensors."""
    summary = hashlib.sha256()
    for tensor in tensors:
        summary.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
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
