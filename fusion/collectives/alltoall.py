"""All-to-all: every rank sends some of its rows to each rank.

`Entry.extra` is how many rows go to each rank, or None for equal shares. The
outputs become the received rows, in rank order, and how many came from each
rank. Splits are exchanged first, and bad ones on any rank fail the operation on
all. On one node rows go through the halves, chunk by chunk; over several nodes
each pair of ranks exchanges messages, all in flight at once.

Cost for S bytes sent by a rank to p ranks: p^2 words for the splits; then, on
one node, a barrier for each chunk of the longest input and S read and written;
over several, S/p bytes to and from each of p - 1 ranks, in segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod

import torch

from fusion.channel import Ints
from fusion.collectives.job import Job, Means
from fusion.collectives.node import ranges

_MOST_SEGMENTS = 256
"""Messages in flight from one rank to another."""
BAD = -1
"""Sent in place of splits that do not fit the input."""


class Alltoall:
    """See the module."""

    def __init__(self, means: Means) -> None:
        self._means = means

    def __call__(self, job: Job) -> None:
        source = job.only_input()
        world = self._means.world
        with self._means.phase("reduce", (job.name,), source.nbytes):
            matrix = world.all_gather_ints(splits_of(job.entries[0].extra, source.shape[0], world.size))
            check_splits(job.name, matrix)
            received = matrix[:, world.rank]
            output = torch.empty((int(received.sum()), *source.shape[1:]), dtype=source.dtype)
            row_bytes = prod(source.shape[1:]) * source.element_size()
            flat_source = source.view(-1).view(torch.uint8)
            flat_output = output.view(-1).view(torch.uint8)
            if len(self._means.topology.nodes) == 1:
                self._through_memory(flat_source, flat_output, matrix * row_bytes)
            else:
                self._by_messages(flat_source, flat_output, matrix * row_bytes)
        job.set_output(output)
        job.entries[0].outputs.append(torch.from_numpy(received.copy()))

    def _through_memory(self, source: torch.Tensor, output: torch.Tensor, counts: Ints) -> None:
        node = self._means.node
        wanted = [bounds(row)[node.rank] for row in counts]
        places = bounds(counts[:, node.rank])
        for at in range(0, int(counts.sum(axis=1).max()), node.chunk_bytes):
            parity = node.flip()
            mine = source[at : at + node.chunk_bytes]
            node.half(parity, node.rank, torch.uint8)[: len(mine)].copy_(mine)
            node.barrier()
            for rank, (lo, hi) in enumerate(wanted):
                begin, end = max(lo, at), min(hi, at + node.chunk_bytes)
                if begin < end:
                    place = places[rank][0] + begin - lo
                    half = node.half(parity, rank, torch.uint8)
                    output[place : place + end - begin].copy_(half[begin - at : end - at])

    def _by_messages(self, source: torch.Tensor, output: torch.Tensor, counts: Ints) -> None:
        world = self._means.world
        outgoing = bounds(counts[world.rank])
        incoming = bounds(counts[:, world.rank])
        requests = []
        for distance in range(1, world.size):
            left, right = (world.rank - distance) % world.size, (world.rank + distance) % world.size
            for lo, hi in self._segments(*incoming[left]):
                requests += world.receive(output[lo:hi], left)
            for lo, hi in self._segments(*outgoing[right]):
                requests += world.send(source[lo:hi], right)
        output[slice(*incoming[world.rank])].copy_(source[slice(*outgoing[world.rank])])
        world.wait_all(requests)

    def _segments(self, lo: int, hi: int) -> list[tuple[int, int]]:
        """Messages as long as MPI sends at once, if that are not too many; both sides cut alike."""
        return ranges(lo, hi, max(self._means.segment_bytes, (hi - lo) // _MOST_SEGMENTS + 1))


def splits_of(extra: Sequence[int] | torch.Tensor | None, rows: int, size: int) -> list[int]:
    """The rows for each rank, or BAD for each if they do not add up to `rows`."""
    if extra is None:
        return [rows // size] * size if rows % size == 0 else [BAD] * size
    splits = [int(count) for count in extra]
    fits = len(splits) == size and min(splits) >= 0 and sum(splits) == rows
    return splits if fits else [BAD] * size


def check_splits(name: str, matrix: Ints) -> None:
    """Refuse an all-to-all for which some rank gave splits that do not fit."""
    bad = [rank for rank, row in enumerate(matrix) if row[0] == BAD]
    if bad:
        raise ValueError(
            f"all-to-all '{name}': the splits of ranks {', '.join(map(str, bad))} do not fit their input: "
            "give one count for each rank, none negative, that add up to the first dimension; without "
            "splits, the first dimension must be a multiple of the number of ranks"
        )


def bounds(counts: Ints | Sequence[int]) -> list[tuple[int, int]]:
    """Where each of some parts begins and ends that lie one after the other."""
    ends = list(accumulate(int(count) for count in counts))
    return list(zip([0, *ends[:-1]], ends, strict=True))
