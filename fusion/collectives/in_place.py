"""All-reduce of a bucket that lies in an arena: no copy in, no copy out.

Each rank owns a slice of the bucket. It sums its slice of all buckets of the
node, in rank order, into its own, and writes the result to the others. Over
several nodes the owners reduce their slices in between (`between.py`), in pieces
of a part of the fusion buffer, and leave that under way.

Cost for S bytes on n ranks of a node: no message inside it; 2 barriers, or over
several nodes one and an announcement a piece; each rank reads S and writes S in
all. Between N nodes with k owners each: 2 S/k (N-1)/N bytes sent and received by
an owner.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial as bind

import torch

from fusion.arena import view
from fusion.arithmetic import Arithmetic
from fusion.collectives.between import Between
from fusion.collectives.job import Job, Means
from fusion.collectives.node import ranges, slices
from fusion.collectives.pipeline import DEPTH, Crossing, Operation, nothing


class InPlaceAllreduce:
    """See the module."""

    def __init__(self, means: Means) -> None:
        self._means = means
        self._node = means.node
        self._owners = means.topology.slices
        self._between = Between(means.cross, means.segment_bytes)

    def __call__(self, job: Job) -> None:
        arithmetic = self._means.arithmetic(job.response)
        buckets = self._buckets(job)
        cuts = slices(job.layout.total, self._owners, job.layout.itemsize)
        lo, hi = cuts[self._node.rank] if self._node.rank < self._owners else (0, 0)
        mine = [bucket[lo:hi] for bucket in buckets]
        if len(self._means.topology.nodes) == 1:
            self._within_node(job, mine, arithmetic)
        else:
            longest = max(hi - lo for lo, hi in cuts)
            self._between_nodes(job, mine, longest, arithmetic)

    def _buckets(self, job: Job) -> list[torch.Tensor]:
        """The bucket in the memory of each rank of the node.

        Raises:
            ValueError: the request does not describe one; alike on all ranks.
        """
        request = job.response.first
        region = request.region
        if region is None or len(request.shapes) != 1:
            raise ValueError(f"'{job.name}' must be one tensor to be reduced in an arena: submit its bucket")
        arena = self._means.arenas.get(region.arena)
        if arena is None:
            raise ValueError(f"'{job.name}' refers to arena {region.arena}, which does not exist")
        return [
            view(arena.peer(peer), region.offset, job.layout.total, job.response.dtype)
            for peer in range(self._node.size)
        ]

    def _within_node(self, job: Job, mine: Sequence[torch.Tensor], arithmetic: Arithmetic) -> None:
        with self._means.phase("reduce", (job.name,), job.response.nbytes):
            self._node.barrier()
            for pieces in self._chunks(mine):
                arithmetic.reduce(pieces, pieces[self._node.rank])
                self._spread(pieces)
            self._node.barrier()

    def _between_nodes(
        self, job: Job, mine: Sequence[torch.Tensor], longest: int, arithmetic: Arithmetic
    ) -> None:
        """Each rank of the node begins as many operations, even if its own slice is shorter than others'."""
        pipeline, began = self._means.pipeline, time.monotonic()
        most = max(1, self._means.buffer_bytes // DEPTH // job.layout.itemsize)
        self._node.barrier()
        for at in range(0, max(1, longest), most):
            lane = pipeline.enter()
            pieces = [bucket[at : at + most] for bucket in mine]
            crossing = self._begin_crossing(pieces, arithmetic, lane)
            end = bind(self._record, job, began) if at + most >= longest else nothing
            job.last = Operation(self._node, crossing, bind(self._spread, pieces), end)
            pipeline.add(job.last)

    def _begin_crossing(
        self, pieces: Sequence[torch.Tensor], arithmetic: Arithmetic, lane: int
    ) -> Crossing | None:
        own = pieces[self._node.rank]
        if not len(own):
            return None
        partial = own
        if arithmetic.widens:
            partial = self._means.scratch.take(arithmetic.accumulator, len(own), f"partial {lane}")
        at = 0
        for chunk in self._chunks(pieces):
            arithmetic.accumulate(chunk, partial[at : at + len(chunk[0])])
            at += len(chunk[0])
        return self._between.begin_all_reduce(partial, own, arithmetic, lane)

    def _chunks(self, pieces: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """The same range of every rank's piece, as much as stays in cache at a time."""
        most = self._node.chunk_bytes // pieces[0].element_size()
        return [[piece[lo:hi] for piece in pieces] for lo, hi in ranges(0, len(pieces[0]), most)]

    def _spread(self, pieces: Sequence[torch.Tensor]) -> None:
        mine = pieces[self._node.rank]
        for rank, piece in enumerate(pieces):
            if rank != self._node.rank:
                piece.copy_(mine)

    def _record(self, job: Job, began: float) -> None:
        self._means.recorder.span("reduce", (job.name,), began, time.monotonic(), job.response.nbytes)
