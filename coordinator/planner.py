"""Which ready tensors share a fusion buffer: a pure function of the agreed set, and what was found kept.

Every rank calls `fuse` with the same requests in the same order, so every rank
gets the same responses.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import chain, pairwise
from typing import Any

import numpy as np

from coordinator.messages import OpKind, Part, ReduceOp, Request, Response
from coordinator.registry import Registry, Slots

BLOCK = 1024
"""A larger set is planned in blocks of slots. Where a cycle cuts a burst of thousands of tensors differs from
step to step, so that the sets hardly ever recur; of the blocks, all but those at the cut do."""
_MOST_PLANNED = 1 << 18
"""Slots of all kept plans together."""


def fuse(requests: Iterable[Request], threshold: int) -> tuple[Response, ...]:
    """Pack all-reduces of one kind greedily into responses of at most `threshold` bytes.

    A tensor larger than the threshold goes alone; threshold 0 fuses nothing. What a
    request with a codec asks for is a bucket by itself, so that what a compressor
    sees does not depend on what is ready at the same time. A different dtype, op,
    scale or device never ends a bucket, it only fills another one beside it.
    Responses come in the order of their first part.

    Args:
        requests: the agreed ready set, in the agreed order.
        threshold: bytes of a fusion buffer.
    """
    buckets: list[_Bucket] = []
    filling: dict[tuple[Any, ...], _Bucket] = {}
    for request in requests:
        for part in request.parts:
            dtype = part.dtype
            key = _key(request, dtype)
            bucket = filling.get(key)
            if bucket is None or not _fits(part, bucket, threshold):
                bucket = _Bucket(request.kind, dtype)
                buckets.append(bucket)
                filling[key] = bucket
            bucket.add(part)
    return tuple(bucket.response() for bucket in buckets)


def blocks(ready: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The sets in which ascending slots are planned: more than `BLOCK` of them are cut at its multiples."""
    if len(ready) <= BLOCK:
        return [ready]
    cuts = [bisect_left(ready, edge) for edge in range(BLOCK, ready[-1] + 1, BLOCK)]
    return [ready[a:b] for a, b in pairwise([0, *cuts, len(ready)]) if a < b]


class PlanCache:
    """The responses for agreed sets of slots that were met before, the least recently used dropped first.

    Cycle thread only.

    Args:
        registry: says which requests the slots are.
        threshold: bytes of a fusion buffer.
    """

    def __init__(self, registry: Registry, threshold: int) -> None:
        self._registry = registry
        self._threshold = threshold
        self._plans: dict[tuple[int, ...], tuple[tuple[Response, ...], Slots]] = {}
        self._planned = 0
        self._version = 0

    def get(self, ready: tuple[int, ...]) -> tuple[tuple[Response, ...], Slots]:
        """What to run for an agreed set, and the set once more."""
        if self._registry.version != self._version:
            self._plans.clear()
            self._planned = 0
            self._version = self._registry.version
        plans = [self._plan(run) for run in blocks(ready)]
        if len(plans) == 1:
            return plans[0]
        return tuple(chain.from_iterable(responses for responses, _ in plans)), np.array(ready)

    def _plan(self, ready: tuple[int, ...]) -> tuple[tuple[Response, ...], Slots]:
        plan = self._plans.pop(ready, None)
        if plan is None:
            responses = fuse(map(self._registry.request, ready), self._threshold)
            plan = responses, np.array(ready)
            self._planned += len(ready)
        self._plans[ready] = plan
        while self._planned > _MOST_PLANNED and len(self._plans) > 1:
            oldest = next(iter(self._plans))
            self._planned -= len(oldest)
            del self._plans[oldest]
        return plan


class _Bucket:
    """A response while it is being filled."""

    def __init__(self, kind: OpKind, dtype: str) -> None:
        self.kind = kind
        self.dtype = dtype
        self.parts: list[Part] = []
        self.nbytes = 0

    def add(self, part: Part) -> None:
        self.parts.append(part)
        self.nbytes += part.nbytes

    def response(self) -> Response:
        return Response(self.kind, self.dtype, tuple(self.parts))


def _fits(part: Part, bucket: _Bucket, threshold: int) -> bool:
    """Whether a part joins the bucket of its key."""
    if part.request.codec != "none":
        return True  # No other request has its key.
    return _fuses(part.request) and bucket.nbytes + part.nbytes <= threshold


def _fuses(request: Request) -> bool:
    """Only all-reduces share a buffer; a bucket in shared memory is one already,
    and Adasum weighs each tensor by its own norm."""
    return request.kind == OpKind.ALLREDUCE and request.region is None and request.op != ReduceOp.ADASUM


def _key(request: Request, dtype: str) -> tuple[Any, ...]:
    return (
        request.kind,
        dtype,
        request.op,
        request.prescale,
        request.postscale,
        request.root_rank,
        request.device,
        request.codec if request.codec == "none" else request.name,
        request.region is None,
    )
