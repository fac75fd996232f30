"""All-reduce inside one node, through shared memory, for tensors that lie anywhere.

Chunk by chunk, so that a chunk stays in cache from pack to unpack: every rank
packs the chunk into its half; then each sums its own slice of all halves, in
rank order, into its own half; then every rank unpacks each slice from its
owner's half.

Cost for S bytes on n ranks: no message; 2 barriers a chunk; each rank reads and
writes S packing, reads S and writes S/n summing, reads and writes S unpacking.
"""

from __future__ import annotations

import torch

from fusion.collectives.job import Job, Means
from fusion.collectives.node import NodeBuffer, ranges, slices
from fusion.packing import Layout, Span, Window

MOST_KEPT = 1024
"""Chunks of one response whose views are kept: beyond that, moving the data takes far longer."""


class SharedAllreduce:
    """See the module."""

    def __init__(self, means: Means) -> None:
        self._means = means
        self._node = means.node

    def __call__(self, job: Job) -> None:
        means, node, layout = self._means, self._node, job.layout
        arithmetic = means.arithmetic(job.response)
        for lo, hi in ranges(0, layout.total, node.chunk_bytes // layout.itemsize):
            chunk = _chunk(layout, node, lo, hi)
            nbytes = (hi - lo) * layout.itemsize
            with means.phase("pack", chunk.names, nbytes):
                chunk.packing.pack(job.tensors)
            with means.phase("reduce", chunk.names, nbytes):
                node.barrier()
                if len(chunk.result):
                    arithmetic.reduce(chunk.slices, chunk.result)
                node.barrier()
            with means.phase("unpack", chunk.names, nbytes):
                chunk.unpacking.unpack(job.tensors)
        job.tensors.flush()


class _Chunk:
    """The views for elements [lo, hi) of a layout in one parity of halves."""

    def __init__(self, layout: Layout, node: NodeBuffer, parity: int, lo: int, hi: int) -> None:
        halves: list[torch.Tensor] = [
            node.half(parity, rank, layout.dtype)[: hi - lo] for rank in range(node.size)
        ]
        cuts = slices(hi - lo, node.size, layout.itemsize)
        begin, end = cuts[node.rank]
        self.names = layout.names(lo, hi)
        self.packing = Window(layout, [Span(lo, halves[node.rank])])
        self.slices = [half[begin:end] for half in halves]
        self.result = self.slices[node.rank]
        self.unpacking = Window(
            layout, [Span(lo + a, half[a:b]) for half, (a, b) in zip(halves, cuts, strict=True) if a < b]
        )


def _chunk(layout: Layout, node: NodeBuffer, lo: int, hi: int) -> _Chunk:
    key = (lo, node.flip())
    chunk: _Chunk | None = layout.kept.get(key)
    if chunk is None:
        chunk = _Chunk(layout, node, key[1], lo, hi)
        if len(layout.kept) < 2 * MOST_KEPT:
            layout.kept[key] = chunk
    return chunk
