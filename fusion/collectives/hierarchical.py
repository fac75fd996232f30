"""All-reduce over several nodes: combine inside each node, then between nodes, spread inside each.

Every local rank that exists on all nodes owns a slice of each chunk. It sums
its slices of all halves of its node into its vector, reduces the vector with the
same local rank of the other nodes (`between.py`), and every rank of the node
unpacks from the owners' vectors. So no leader, and all links of a node are used; nodes may have
different numbers of ranks. With a node of one (`NodeBuffer.private`) and the
channel of all ranks no ranks are combined first.

A response goes in pieces of a part of the fusion buffer, so that one is packed or
unpacked while another is between nodes, in this response or the next. Cost for S
bytes on N nodes with k owners each: a rank sends and receives 2 S/k (N-1)/N bytes;
one barrier a chunk and one announcement a piece; memory is read and written as in
`shared.py`, and once more by the ring.
"""

from __future__ import annotations

import time

import torch

from fusion.arithmetic import Arithmetic
from fusion.channel import Channel
from fusion.collectives.between import Between
from fusion.collectives.job import Job, Means
from fusion.collectives.node import ALIGN, NodeBuffer, ranges, slices
from fusion.collectives.pipeline import DEPTH, Operation, nothing
from fusion.collectives.shared import MOST_KEPT
from fusion.packing import Layout, Span, Window


def vector_bytes(buffer_bytes: int, chunk_bytes: int, owners: int) -> int:
    """The size of an owner's vector, for a fusion buffer of `buffer_bytes`."""
    each = -(-chunk_bytes // (owners * ALIGN)) * ALIGN
    return max(DEPTH, buffer_bytes // chunk_bytes) * each


class HierarchicalAllreduce:
    """See the module.

    Args:
        means: for arithmetic, scratch memory and reporting.
        node: the ranks that combine first.
        cross: the ranks between which the rest is done, unless this rank owns no slice.
        owners: how many ranks of every node own slices.
    """

    def __init__(self, means: Means, node: NodeBuffer, cross: Channel, owners: int) -> None:
        self._means = means
        self._node = node
        self._owners = owners
        self._owns = node.rank < owners
        self._between = Between(cross, means.segment_bytes)

    def __call__(self, job: Job) -> None:
        layout, pipeline = job.layout, self._means.pipeline
        arithmetic = self._means.arithmetic(job.response)
        chunks = max(1, self._means.buffer_bytes // self._node.chunk_bytes // DEPTH)
        for lo, hi in ranges(0, layout.total, chunks * (self._node.chunk_bytes // layout.itemsize)):
            lane = pipeline.enter()
            piece = self._piece(layout, lo, hi, lane)
            job.last = self._begin(job, piece, arithmetic, lane)
            pipeline.add(job.last)

    def _begin(self, job: Job, piece: _Piece, arithmetic: Arithmetic, lane: int) -> Operation:
        """Pack a piece and begin its way between nodes; the operation ends with the piece unpacked."""
        if piece.direct is not None and not arithmetic.widens:
            self._copy_in(job, piece.direct, piece)
            arithmetic.accumulate([piece.vector], piece.vector)
            partial = piece.vector
        else:
            partial = self._combine_on_node(job, piece, arithmetic, lane)
        began = time.monotonic()
        run = None
        if self._owns and len(partial):
            run = self._between.begin_all_reduce(partial, piece.vector, arithmetic, lane)

        def unpack() -> None:
            self._means.recorder.span("reduce", piece.names, began, time.monotonic(), piece.nbytes)
            with self._means.phase("unpack", piece.names, piece.nbytes):
                piece.unpacking.unpack(job.tensors)
                if piece.last:
                    job.tensors.flush()

        return Operation(self._node, run, nothing, unpack)

    def _copy_in(self, job: Job, window: Window, piece: _Piece) -> None:
        with self._means.phase("pack", piece.names, piece.nbytes):
            window.pack(job.tensors)

    def _combine_on_node(self, job: Job, piece: _Piece, arithmetic: Arithmetic, lane: int) -> torch.Tensor:
        """Sum this rank's slices of the piece over the node, chunk by chunk."""
        partial = piece.vector
        if arithmetic.widens:
            partial = self._means.scratch.take(arithmetic.accumulator, len(partial), f"partial {lane}")
        for number, (lo, hi) in enumerate(piece.chunks):
            parity = self._node.flip()
            names, window, inputs = piece.chunk(number, parity)
            nbytes = (hi - lo) * job.layout.itemsize
            with self._means.phase("pack", names, nbytes):
                window.pack(job.tensors)
            with self._means.phase("reduce", names, nbytes):
                self._node.barrier()
                begin, end = piece.places[number]
                if begin < end:
                    arithmetic.accumulate(inputs, partial[begin:end])
        return partial

    def _piece(self, layout: Layout, lo: int, hi: int, lane: int) -> _Piece:
        key = ("ring", self._node.size, lo, lane)
        piece: _Piece | None = layout.kept.get(key)
        if piece is None:
            piece = _Piece(layout, self._node, self._owners, (lo, hi), lane)
            if len(layout.kept) < MOST_KEPT:
                layout.kept[key] = piece
        return piece


class _Piece:
    """The views for elements [lo, hi) of a layout: as much as one lane of the vectors holds.

    An owner's lane has its slices of all chunks, one after the other.
    """

    def __init__(
        self, layout: Layout, node: NodeBuffer, owners: int, elements: tuple[int, int], lane: int
    ) -> None:
        lo, hi = elements
        self._layout = layout
        self._node = node
        self._kept: dict[tuple[int, int], tuple[tuple[str, ...], Window, list[torch.Tensor]]] = {}
        self.names = layout.names(lo, hi)
        self.nbytes = (hi - lo) * layout.itemsize
        self.last = hi == layout.total
        self.chunks = ranges(lo, hi, node.chunk_bytes // layout.itemsize)
        self._cuts = [slices(end - begin, owners, layout.itemsize) for begin, end in self.chunks]
        vectors = [_lane(node, owner, layout, lane) for owner in range(owners)]
        used = [0] * owners
        self.places: list[tuple[int, int]] = []
        """Of each chunk: where this rank's slice lies in its vector."""
        spans = []
        for (chunk, _), cuts in zip(self.chunks, self._cuts, strict=True):
            for owner, (begin, end) in enumerate(cuts):
                at, used[owner] = used[owner], used[owner] + end - begin
                spans.append(Span(chunk + begin, vectors[owner][at : used[owner]]))
            self.places.append(self._place(cuts, used))
        mine = used[node.rank] if node.rank < owners else 0
        self.vector = _lane(node, node.rank, layout, lane)[:mine]
        self.direct = Window(layout, [Span(lo, self.vector)]) if node.size == 1 else None
        self.unpacking = self.direct or Window(layout, [span for span in spans if len(span.memory)])

    def chunk(self, number: int, parity: int) -> tuple[tuple[str, ...], Window, list[torch.Tensor]]:
        """Names in the chunk, the window that packs it, and this rank's slice of every half."""
        kept = self._kept.get((number, parity))
        if kept is not None:
            return kept
        lo, hi = self.chunks[number]
        node, dtype = self._node, self._layout.dtype
        halves = [node.half(parity, rank, dtype) for rank in range(node.size)]
        cuts = self._cuts[number]
        begin, end = cuts[node.rank] if node.rank < len(cuts) else (0, 0)
        window = Window(self._layout, [Span(lo, halves[node.rank][: hi - lo])])
        made = self._layout.names(lo, hi), window, [half[begin:end] for half in halves]
        self._kept[number, parity] = made
        return made

    def _place(self, cuts: list[tuple[int, int]], used: list[int]) -> tuple[int, int]:
        rank = self._node.rank
        if rank >= len(cuts):
            return 0, 0
        begin, end = cuts[rank]
        return used[rank] - (end - begin), used[rank]


def _lane(node: NodeBuffer, rank: int, layout: Layout, lane: int) -> torch.Tensor:
    """The part of a rank's vector for operations of one lane."""
    length = node.vector_bytes // DEPTH // ALIGN * ALIGN // layout.itemsize
    return node.vector(rank, layout.dtype)[lane * length : (lane + 1) * length]
