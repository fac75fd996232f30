"""Adasum: an all-reduce that adds what is orthogonal and averages what is parallel.

Two vectors become `a (1 - ab / 2aa) + b (1 - ab / 2bb)`, tensor by tensor; more
are combined in pairs, neighbouring ranks first, so the number of ranks is a power
of two. A vector of zeros leaves the other as it is.

Recursive vector halving and doubling: in step k a rank exchanges half of its part
with the rank 2^k away and combines the half it keeps, whose dot products are
summed over the 2^(k+1) ranks that hold the other parts; then complete parts
travel back the same way. Each element is computed by one rank and copied to the
others, so all have the same bits. Dot products and combinations are computed in
float64; between steps 16-bit floats are kept in float32, and rounded once at the end.

Cost for S bytes and t tensors on p ranks: a rank sends and receives
2 S (p-1)/p bytes in 2 log2(p) messages, and 24 t bytes in each of
log2(p) (log2(p) + 1) / 2 more. 16-bit floats send twice that in the first half.

Maleki et al., "Scaling distributed training with adaptive summation",
arXiv:2006.02924.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fusion.collectives.job import Job, Means
from fusion.collectives.node import ranges
from fusion.packing import Layout, Span, Window

CHUNK = 1 << 16
"""Elements that are widened to float64 at once: they stay in cache."""

Range = tuple[int, int]


class AdasumAllreduce:
    """See the module."""

    def __init__(self, means: Means) -> None:
        self._means = means
        self._world = means.world

    def __call__(self, job: Job) -> None:
        layout, request = job.layout, job.response.first
        names, nbytes = layout.names(0, layout.total), layout.total * layout.itemsize
        _require_power_of_two(self._world.size)
        vector = self._take(_kept_in(layout.dtype), layout.total, "adasum vector")
        with self._means.phase("pack", names, nbytes):
            Window(layout, [Span(0, vector)]).pack(job.tensors)
            if request.prescale != 1.0:
                vector.mul_(request.prescale)
        with self._means.phase("reduce", names, nbytes):
            result = self._reduce(layout, vector, request.postscale)
        with self._means.phase("unpack", names, nbytes):
            Window(layout, [Span(0, result)]).unpack(job.tensors)
            job.tensors.flush()

    def _reduce(self, layout: Layout, vector: torch.Tensor, postscale: float) -> torch.Tensor:
        """Combine the vectors of all ranks; the result is in the dtype of the tensors."""
        steps = list(_halves(self._world.rank, self._world.size, layout.total))
        landing = self._take(vector.dtype, -(-layout.total // 2), "adasum landing")
        for distance, mine, others in steps:
            landed = landing[: mine[1] - mine[0]]
            self._exchange(vector[slice(*others)], landed, distance)
            self._combine(layout, mine, vector[slice(*mine)], landed, distance)
        lo, hi = steps[-1][1] if steps else (0, layout.total)
        if postscale != 1.0:
            vector[lo:hi].mul_(postscale)
        result = vector
        if vector.dtype != layout.dtype:
            result = self._take(layout.dtype, layout.total, "adasum result")
            result[lo:hi].copy_(vector[lo:hi])
        for distance, mine, others in reversed(steps):
            self._exchange(result[slice(*mine)], result[slice(*others)], distance)
        return result

    def _combine(
        self, layout: Layout, mine: Range, kept: torch.Tensor, landed: torch.Tensor, distance: int
    ) -> None:
        """One step of the halving: `kept`, this rank's part `mine`, is combined with what landed."""
        lower, upper = (landed, kept) if self._world.rank & distance else (kept, landed)
        parts = [
            (piece.part, (piece.at, piece.at + piece.stop - piece.start)) for piece in layout.pieces(*mine)
        ]
        products = torch.zeros(len(layout.counts), 3, dtype=torch.float64)
        for part, (lo, hi) in parts:
            products[part] = _products(lower[lo:hi], upper[lo:hi])
        self._sum(products.view(-1), distance)
        for part, (lo, hi) in parts:
            _mix(lower[lo:hi], upper[lo:hi], _weights(*products[part].tolist()), kept[lo:hi])

    def _sum(self, products: torch.Tensor, distance: int) -> None:
        """Sum over the ranks that were combined so far; addition commutes, so all get the same bits."""
        theirs = torch.empty_like(products)
        step = 1
        while step <= distance:
            self._exchange(products, theirs, step)
            products.add_(theirs)
            step *= 2

    def _exchange(self, send: torch.Tensor, receive: torch.Tensor, distance: int) -> None:
        other = self._world.rank ^ distance
        requests = self._world.receive(receive, other)
        self._world.wait_all([*requests, *self._world.send(send, other)])

    def _take(self, dtype: torch.dtype, count: int, purpose: str) -> torch.Tensor:
        """Memory that is kept for the next call, unless a huge tensor would keep too much."""
        if count * dtype.itemsize > self._means.buffer_bytes:
            return torch.empty(count, dtype=dtype)
        return self._means.scratch.take(dtype, count, purpose)


def _require_power_of_two(size: int) -> None:
    if size & (size - 1):
        raise ValueError(f"Adasum combines ranks in pairs: {size} ranks are not a power of two")


def _kept_in(dtype: torch.dtype) -> torch.dtype:
    if not dtype.is_floating_point:
        raise ValueError(f"Adasum is defined for floating-point tensors, not for {dtype}")
    return torch.float64 if dtype == torch.float64 else torch.float32


def _halves(rank: int, size: int, count: int) -> Iterator[tuple[int, Range, Range]]:
    """Of each step: the distance of the partner, the half this rank keeps, and the half it gives away."""
    lo, hi = 0, count
    distance = 1
    while distance < size:
        middle = (lo + hi) // 2
        first, second = (lo, middle), (middle, hi)
        mine, others = (second, first) if rank & distance else (first, second)
        yield distance, mine, others
        lo, hi = mine
        distance *= 2


def _products(lower: torch.Tensor, upper: torch.Tensor) -> torch.Tensor:
    """The dot products ab, aa and bb."""
    total = torch.zeros(3, dtype=torch.float64)
    for lo, hi in ranges(0, len(lower), CHUNK):
        a, b = lower[lo:hi].double(), upper[lo:hi].double()
        total += torch.stack([torch.dot(a, b), torch.dot(a, a), torch.dot(b, b)])
    return total


def _weights(ab: float, aa: float, bb: float) -> tuple[float, float]:
    """What both vectors are multiplied by before they are added."""
    return 1.0 if aa == 0.0 else 1.0 - 0.5 * ab / aa, 1.0 if bb == 0.0 else 1.0 - 0.5 * ab / bb


def _mix(lower: torch.Tensor, upper: torch.Tensor, weights: tuple[float, float], out: torch.Tensor) -> None:
    """The weighted sum, in float64: weights of very unequal vectors exceed float32. `out` may be either."""
    for lo, hi in ranges(0, len(out), CHUNK):
        mixed = lower[lo:hi].double() * weights[0]
        out[lo:hi].copy_(mixed.add_(upper[lo:hi].double(), alpha=weights[1]))
