"""What a rank that has joined puts into the collectives of the others: values that change nothing.

Called on the cycle thread, by the executor.
"""

from __future__ import annotations

import time

import torch

from coordinator.executor import Entry
from coordinator.handle import Handle
from coordinator.messages import ANY, OpKind, ReduceOp, Request
from fusion.dtypes import to_torch


def absent_entry(request: Request, handle: Handle, size: int, device: torch.device | None = None) -> Entry:
    """An entry with neutral inputs and outputs that nobody reads.

    Args:
        request: what the other ranks run.
        handle: nobody waits for it.
        size: how many ranks take part.
        device: where the tensors of the others are; default host memory.
    """
    inputs = [
        torch.full(
            [0 if dim == ANY else dim for dim in shape],
            neutral(request, dtype),
            dtype=to_torch(dtype),
            device=device,
        )
        for shape, dtype in zip(request.shapes, request.dtypes, strict=True)
    ]
    makes_output = request.kind in (OpKind.ALLGATHER, OpKind.ALLTOALL, OpKind.REDUCESCATTER)
    outputs = [None] * len(inputs) if makes_output else list(inputs)
    extra = [0] * size if request.kind == OpKind.ALLTOALL else None
    return Entry(request, inputs, outputs, handle, enqueued_at=time.monotonic(), extra=extra)


def neutral(request: Request, dtype: str) -> float | int | bool:
    """The value that, once prescaled, leaves every reduction as it is.

    For a product of scaled integers there may be none: then it is the nearest.
    """
    if request.op not in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT) or request.prescale == 0.0:
        return 0
    torch_dtype = to_torch(dtype)
    scale = request.prescale
    if request.op == ReduceOp.PRODUCT:
        return 1.0 / scale if torch_dtype.is_floating_point else round(1.0 / scale)
    largest = (request.op == ReduceOp.MIN) == (scale > 0.0)
    if dtype == "bool":
        return largest
    if torch_dtype.is_floating_point:
        return float("inf") if largest else float("-inf")
    return _extreme(torch.iinfo(torch_dtype), largest, scale)


def _extreme(limits: torch.iinfo, largest: bool, scale: float) -> int:
    """The end of an integer range, or as near as it may be without overflowing when scaled."""
    if scale == 1.0:
        return limits.max if largest else limits.min
    # Scaling is done in float64, where the largest int64 would round up to 2^63.
    most = limits.max - (4096 if limits.bits == 64 else 0)
    least = max(limits.min, -most)
    return int((most if largest else least) / max(1.0, abs(scale)))
