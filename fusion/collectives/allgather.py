"""All-gather: every rank gets the rows of all ranks, in rank order.

First dimensions may differ: they are exchanged first. On one node each rank
copies a chunk of its rows into its half and every rank copies all halves into
its output. Over several nodes whole contributions go once around the ring,
straight into the outputs.

Cost for a result of S bytes on p ranks. One node: 1 message of a word, one
barrier for each chunk of the longest contribution, S read and written.
Several: S (p-1)/p bytes sent and received by each rank, in p - 1 steps.
"""

from __future__ import annotations

from itertools import accumulate

import torch

from fusion.channel import Ints
from fusion.collectives.job import Job, Means
from fusion.collectives.ring import Ring


class Allgather:
    """See the module."""

    def __init__(self, means: Means) -> None:
        self._means = means
        self._ring = Ring(means.world, means.segment_bytes)

    def __call__(self, job: Job) -> None:
        source = job.only_input()
        with self._means.phase("reduce", (job.name,), source.nbytes):
            rows: Ints = self._means.world.all_gather_ints([source.shape[0]])[:, 0]
            output = torch.empty((int(rows.sum()), *source.shape[1:]), dtype=source.dtype)
            row_bytes = source[0:1].numel() * source.element_size() if len(source) else _row_bytes(source)
            ends = list(accumulate(int(count) * row_bytes for count in rows))
            blocks = list(zip([0, *ends[:-1]], ends, strict=True))
            target = output.view(-1).view(torch.uint8)
            if len(self._means.topology.nodes) == 1:
                self._through_memory(source.view(-1).view(torch.uint8), target, blocks)
            else:
                lo, hi = blocks[self._means.world.rank]
                target[lo:hi].copy_(source.view(-1).view(torch.uint8))
                self._ring.all_gather(target, blocks)
            job.set_output(output)

    def _through_memory(
        self, source: torch.Tensor, target: torch.Tensor, blocks: list[tuple[int, int]]
    ) -> None:
        node = self._means.node
        longest = max(hi - lo for lo, hi in blocks)
        for at in range(0, longest, node.chunk_bytes):
            parity = node.flip()
            mine = source[at : at + node.chunk_bytes]
            node.half(parity, node.rank, torch.uint8)[: len(mine)].copy_(mine)
            node.barrier()
            for rank, (lo, hi) in enumerate(blocks):
                count = min(hi - lo - at, node.chunk_bytes)
                if count > 0:
                    target[lo + at : lo + at + count].copy_(node.half(parity, rank, torch.uint8)[:count])


def _row_bytes(source: torch.Tensor) -> int:
    row = 1
    for dim in source.shape[1:]:
        row *= dim
    return row * source.element_size()
