"""All-reduce of a bucket that lies in an arena: no copy in, no copy out.

Each rank owns a slice of the bucket. It sums its slice of all buckets of the
node, in rank order, into its own, and writes the result to the others; a
barrier at each end. Over several nodes the owners reduce their slices in between (`between.py`).

Cost for S bytes on n ranks of a node: no message inside it; 2 barriers; each
rank reads S and writes S in all. Between N nodes with k owners each: 2 S/k
(N-1)/N bytes sent and received by an owner.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusion.arena import view
from fusion.arithmetic import Arithmetic
from fusion.collectives.between import Between
from fusion.collectives.job import Job, Means
from fusion.collectives.node import ranges, slices


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
        count, itemsize = job.layout.total, job.layout.itemsize
        with self._means.phase("reduce", (job.name,), count * itemsize):
            self._node.barrier()
            if self._node.rank < self._owners:
                lo, hi = slices(count, self._owners, itemsize)[self._node.rank]
                self._reduce_slice(buckets, lo, hi, arithmetic)
            self._node.barrier()

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

    def _reduce_slice(
        self, buckets: Sequence[torch.Tensor], lo: int, hi: int, arithmetic: Arithmetic
    ) -> None:
        if self._between.size == 1:
            for begin, end in ranges(lo, hi, self._chunk(buckets)):
                pieces = [bucket[begin:end] for bucket in buckets]
                arithmetic.reduce(pieces, pieces[self._node.rank])
                self._spread(pieces)
            return
        for begin, end in ranges(lo, hi, max(1, self._means.buffer_bytes // buckets[0].element_size())):
            self._cross_piece([bucket[begin:end] for bucket in buckets], arithmetic)

    def _cross_piece(self, pieces: Sequence[torch.Tensor], arithmetic: Arithmetic) -> None:
        mine = pieces[self._node.rank]
        partial = mine
        if arithmetic.widens:
            partial = self._means.scratch.take(arithmetic.accumulator, len(mine), "partial")
        for begin, end in ranges(0, len(mine), self._chunk(pieces)):
            arithmetic.accumulate([piece[begin:end] for piece in pieces], partial[begin:end])
        self._between.all_reduce(partial, mine, arithmetic)
        self._spread(pieces)

    def _spread(self, pieces: Sequence[torch.Tensor]) -> None:
        mine = pieces[self._node.rank]
        for rank, piece in enumerate(pieces):
            if rank != self._node.rank:
                piece.copy_(mine)

    def _chunk(self, buckets: Sequence[torch.Tensor]) -> int:
        return self._node.chunk_bytes // buckets[0].element_size()
