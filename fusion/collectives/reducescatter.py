"""Reduce-scatter: each rank gets its rows of the sum, the first rows % size ranks one more.

On one node the ranks take equal steps through their rows: each packs the rows
of that step for every rank into its half, and each sums its own from all halves
straight into its output. Over several nodes it is the first half of the ring.

Cost for an input of S bytes on p ranks. One node: one barrier a chunk; S read and
written packing, S read and S/p written summing. Several: S (p-1)/p bytes sent
and received by each rank (twice that for 16-bit floats), in p - 1 steps.
"""

from __future__ import annotations

from itertools import accumulate

import torch

from fusion.arithmetic import Arithmetic
from fusion.collectives.job import Job, Means
from fusion.collectives.node import ranges
from fusion.collectives.ring import Block, Ring


def rows_of(rows: int, size: int) -> list[int]:
    """How many of `rows` each rank gets."""
    return [rows // size + (rank < rows % size) for rank in range(size)]


class Reducescatter:
    """See the module."""

    def __init__(self, means: Means) -> None:
        self._means = means
        self._ring = Ring(means.world, means.segment_bytes)

    def __call__(self, job: Job) -> None:
        arithmetic = self._means.arithmetic(job.response)
        source = job.only_input()
        if source.dim() == 0:
            raise ValueError(f"reduce-scatter '{job.name}' needs a tensor with a first dimension to scatter")
        world = self._means.world
        rows = rows_of(source.shape[0], world.size)
        row = source.numel() // max(1, source.shape[0])
        ends = list(accumulate(count * row for count in rows))
        blocks = list(zip([0, *ends[:-1]], ends, strict=True))
        output = torch.empty((rows[world.rank], *source.shape[1:]), dtype=source.dtype)
        with self._means.phase("reduce", (job.name,), source.nbytes):
            if len(self._means.topology.nodes) == 1:
                self._through_memory(source.view(-1), output.view(-1), blocks, arithmetic)
            else:
                self._around(source.view(-1), output.view(-1), blocks, arithmetic)
        job.set_output(output)

    def _through_memory(
        self, source: torch.Tensor, output: torch.Tensor, blocks: list[Block], arithmetic: Arithmetic
    ) -> None:
        node = self._means.node
        most = node.chunk_bytes // source.element_size() // node.size
        longest = max(hi - lo for lo, hi in blocks)
        for at in range(0, longest, most):
            parity = node.flip()
            halves = [node.half(parity, rank, source.dtype) for rank in range(node.size)]
            for rank, (lo, hi) in enumerate(blocks):
                part = source[min(lo + at, hi) : min(lo + at + most, hi)]
                halves[node.rank][rank * most : rank * most + len(part)].copy_(part)
            node.barrier()
            target = output[at : at + most]
            if len(target):
                begin = node.rank * most
                arithmetic.reduce([half[begin : begin + len(target)] for half in halves], target)

    def _around(
        self, source: torch.Tensor, output: torch.Tensor, blocks: list[Block], arithmetic: Arithmetic
    ) -> None:
        partial = torch.empty(len(source), dtype=arithmetic.accumulator)
        chunk = self._means.node.chunk_bytes // source.element_size()
        for lo, hi in ranges(0, len(source), chunk):
            arithmetic.accumulate([source[lo:hi]], partial[lo:hi])
        self._ring.reduce_scatter(partial, blocks, arithmetic)
        lo, hi = blocks[self._means.world.rank]
        arithmetic.finish(partial[lo:hi], output)
