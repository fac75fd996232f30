"""This runtime as a contestant: dynamic, tensor by tensor, and static, in place in an arena."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

import fusion.torch as hvd
from coordinator.messages import OpKind, ReduceOp, Region, Request
from fusion import runtime
from fusion.bucketing import Item, lay_out
from scripts.benchmarks.shapes import Shape
from scripts.benchmarks.timing import Contestant

DYNAMIC = "ours, dynamic"
STATIC = "ours, static"


def dynamic(tensors: Sequence[torch.Tensor], scope: str) -> Contestant:
    """`allreduce_async_` for one after the other, last gradient first, then `synchronize` for each."""
    named = [(tensor, f"{scope}.{index}") for index, tensor in enumerate(tensors)]
    named.reverse()

    def run() -> None:
        handles = [hvd.allreduce_async_(tensor, name=name, op=hvd.Sum) for tensor, name in named]
        for handle in handles:
            hvd.synchronize(handle)

    return Contestant(DYNAMIC, run)


def static(
    shapes: Sequence[Shape], scope: str, dtype: str = "float32"
) -> tuple[Contestant, list[torch.Tensor]]:
    """Buckets of an arena, submitted as the optimizer submits them; and the tensors that lie there."""
    current = runtime.current()
    items = [Item(index, dtype, prod(shape)) for index, shape in reversed(list(enumerate(shapes)))]
    layout = lay_out(items, int(current.config.fusion_threshold_mb * 2**20), votes=0)
    arena = current.create_arena(layout.arena_bytes[dtype]).result()
    tensors = []
    work = []
    for number, bucket in enumerate(layout.buckets):
        flat = arena.tensor(bucket.offset, (bucket.count,), dtype)
        region = Region(arena.number, bucket.offset)
        request = Request(
            f"{scope}.bucket{number}",
            OpKind.ALLREDUCE,
            (dtype,),
            ((bucket.count,),),
            op=ReduceOp.SUM,
            region=region,
        )
        work.append((request, flat))
        tensors += [arena.tensor(place.offset, (place.item.count,), dtype) for place in bucket.places]

    def run() -> None:
        handles = [current.submit(request, [flat], [flat]) for request, flat in work]
        for handle in handles:
            handle.result()

    return Contestant(STATIC, run), tensors
