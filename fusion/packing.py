"""A response as one flat buffer: where each tensor lies in it, and copying in and out.

Used by the collectives on the cycle thread. The tensors of a response lie back
to back in the order of its parts, in logical (row-major) order whatever their
strides. `Layout` is the pure map, `Tensors` the tensors of one execution, and
`Window` the views that copy one range; layouts and windows are the same for
every execution of a response and are kept.

Guarantees: a copy in reads each element once, a copy out writes each element of
the outputs once, and respects strides.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, chain
from typing import Any

import msgspec
import torch

from coordinator.executor import Entry
from coordinator.messages import ITEM_SIZE, Response
from fusion.dtypes import to_torch


class Piece(msgspec.Struct, frozen=True, gc=False):
    """Elements [start, stop) of one part, which lie at `at` in a range of the buffer."""

    part: int
    start: int
    stop: int
    at: int
    whole: bool


class Span(msgspec.Struct, frozen=True):
    """Where elements [lo, lo + len(memory)) of the flat buffer are in memory."""

    lo: int
    memory: torch.Tensor


class Layout:
    """Where the parts of a response lie in its flat buffer.

    Attributes:
        total: elements of the buffer.
        kept: what an algorithm prepared for this layout, by keys of its own.
    """

    def __init__(self, response: Response) -> None:
        self.response = response
        self.dtype = to_torch(response.dtype)
        self.itemsize = ITEM_SIZE[response.dtype]
        self.shapes = [part.shape for part in response.parts]
        self.counts = [part.count for part in response.parts]
        self.ends = list(accumulate(self.counts))
        self.total = self.ends[-1]
        self.kept: dict[Any, Any] = {}

    def pieces(self, lo: int, hi: int) -> list[Piece]:
        """The pieces of parts that fill elements [lo, hi); parts with no elements have none."""
        if lo >= hi:
            return []
        first, last = self._first_and_last(lo, hi)
        if first == last:
            return [self._cut(first, lo, hi)]
        inner = slice(first + 1, last)  # Whole for certain, which matters when there are thousands.
        return [
            self._cut(first, lo, hi),
            *(
                Piece(part, 0, count, end - count - lo, whole=True)
                for part, count, end in zip(
                    range(first + 1, last), self.counts[inner], self.ends[inner], strict=True
                )
                if count
            ),
            self._cut(last, lo, hi),
        ]

    def names(self, lo: int, hi: int) -> tuple[str, ...]:
        """Names of the requests with elements in [lo, hi)."""
        if lo >= hi:
            return ()
        first, last = self._first_and_last(lo, hi)
        inside = slice(first, last + 1)
        named = zip(self.response.names[inside], self.counts[inside], strict=True)
        return tuple(dict.fromkeys(name for name, count in named if count))

    def _first_and_last(self, lo: int, hi: int) -> tuple[int, int]:
        """The parts with the elements lo and hi - 1."""
        return bisect_right(self.ends, lo), bisect_left(self.ends, hi)

    def _cut(self, part: int, lo: int, hi: int) -> Piece:
        """What a part has in [lo, hi)."""
        count = self.counts[part]
        begin = self.ends[part] - count
        start, stop = max(lo - begin, 0), min(hi - begin, count)
        return Piece(part, start, stop, begin + start - lo, stop - start == count)


class Tensors:
    """The tensors of one execution, whole or as flat memory.

    A strided tensor that has to be cut is made contiguous once; `flush` copies
    such outputs back.
    """

    def __init__(self, layout: Layout, entries: Sequence[Entry]) -> None:
        self.inputs: list[torch.Tensor]
        self.outputs: list[torch.Tensor]
        if layout.response.grouped:
            pairs = list(zip(entries, layout.response.parts, strict=True))
            self.inputs = [entry.inputs[part.index] for entry, part in pairs]
            self.outputs = [entry.outputs[part.index] for entry, part in pairs]
        else:
            self.inputs = [entry.inputs[0] for entry in entries]
            self.outputs = [entry.outputs[0] for entry in entries]
        self._flat_inputs: dict[int, torch.Tensor] = {}
        self._flat_outputs: dict[int, torch.Tensor] = {}
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def source(self, piece: Piece) -> torch.Tensor:
        """What to read a piece from: shaped if it is a whole tensor, else flat."""
        if piece.whole:
            return self.inputs[piece.part]
        flat = self._flat_inputs.get(piece.part)
        if flat is None:
            flat = self._flat_inputs[piece.part] = self.inputs[piece.part].reshape(-1)
        return flat[piece.start : piece.stop]

    def target(self, piece: Piece) -> torch.Tensor:
        """What to write a piece to: shaped if it is a whole tensor, else flat."""
        if piece.whole:
            return self.outputs[piece.part]
        flat = self._flat_outputs.get(piece.part)
        if flat is None:
            flat = self._flat_outputs[piece.part] = self._flat_output(self.outputs[piece.part])
        return flat[piece.start : piece.stop]

    def flush(self) -> None:
        """Complete the outputs that were written through a copy."""
        for output, copy in self._copies:
            output.copy_(copy.view(output.shape))
        self._copies.clear()

    def _flat_output(self, output: torch.Tensor) -> torch.Tensor:
        if output.is_contiguous():
            return output.view(-1)
        copy = torch.empty(output.numel(), dtype=output.dtype)
        self._copies.append((output, copy))
        return copy


class Window:
    """Ready-made views for copying a range of a layout to or from memory.

    Args:
        layout: of the response.
        spans: where the range lies; one after the other they need not be adjacent in memory.
    """

    def __init__(self, layout: Layout, spans: Sequence[Span]) -> None:
        self._layout = layout
        self._spans = spans
        pieces = [layout.pieces(span.lo, span.lo + len(span.memory)) for span in spans]
        self._pieces_of = pieces
        self._pieces = pieces[0] if len(pieces) == 1 else list(chain.from_iterable(pieces))
        self._whole = _whole(pieces)
        first = self._pieces[0].part if self._pieces else 0
        last = self._pieces[-1].part if self._pieces else 0
        self._flat = all(len(shape) == 1 for shape in layout.shapes[first : last + 1])
        alone = len(spans) == 1 and len(self._pieces) > 1 and self._flat
        self._memory = spans[0].memory if alone else None

    @cached_property
    def _views(self) -> list[torch.Tensor]:
        """Of memory, one for each piece, in its shape if it is whole; not needed to pack into `_memory`."""
        views: list[torch.Tensor] = []
        for span, pieces in zip(self._spans, self._pieces_of, strict=True):
            if pieces:  # Pieces lie back to back; one split costs less than half of as many slices.
                views += span.memory.split([piece.stop - piece.start for piece in pieces])
        if self._flat:
            return views
        shapes = self._layout.shapes
        return [
            view.view(shapes[piece.part]) if piece.whole and len(shapes[piece.part]) != 1 else view
            for piece, view in zip(self._pieces, views, strict=True)
        ]

    def pack(self, tensors: Tensors) -> None:
        """Copy inputs to memory."""
        if not self._pieces:
            return
        if self._whole is not None:
            sources = tensors.inputs[self._whole]
        else:
            sources = [tensors.source(piece) for piece in self._pieces]
        if self._memory is not None:
            torch.cat(sources, out=self._memory)  # A third of the time of one copy for each.
        else:
            _copy(self._views, sources)

    def unpack(self, tensors: Tensors) -> None:
        """Copy memory to outputs."""
        if not self._pieces:
            return
        if self._whole is not None:
            targets = tensors.outputs[self._whole]
        else:
            targets = [tensors.target(piece) for piece in self._pieces]
        _copy(targets, self._views)


class LayoutCache:
    """Layouts of responses that recur, the least recently used dropped first.

    Responses are told apart by identity, because the plan cache hands out the same
    objects, and hashing a thousand parts costs more than finding them in a buffer.

    Args:
        most_parts: parts of all kept layouts together.
    """

    def __init__(self, most_parts: int = 1 << 14) -> None:
        self._most_parts = most_parts
        self._parts = 0
        self._layouts: dict[int, Layout] = {}

    def get(self, response: Response) -> Layout:
        """The layout of a response, made if it is not kept."""
        # A kept layout holds its response, so no other object can have the same id.
        layout = self._layouts.pop(id(response), None)
        if layout is None:
            layout = Layout(response)
            self._parts += len(response.parts)
        self._layouts[id(response)] = layout
        while self._parts > self._most_parts and len(self._layouts) > 1:
            oldest = self._layouts.pop(next(iter(self._layouts)))
            self._parts -= len(oldest.response.parts)
        return layout


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source to its target.

    In inference mode torch skips what autograd would do for each tensor, a fifth of the
    time of a small copy. The targets stay ordinary tensors, and their version counters, by
    which autograd notices a change, still go up.
    """
    with torch.inference_mode():
        torch._foreach_copy_(targets, sources)


def _whole(pieces_of: Sequence[Sequence[Piece]]) -> slice | None:
    """The parts that the pieces of spans are, if they are consecutive parts and all whole."""
    runs = [(pieces[0], pieces[-1], len(pieces)) for pieces in pieces_of if pieces]
    if not runs:
        return None
    begin = at = runs[0][0].part
    for first, last, number in runs:
        # What lies between the first and the last piece of a span is whole; if parts without elements lie
        # there too, there are fewer pieces than parts.
        if not (first.whole and last.whole and first.part == at and last.part == at + number - 1):
            return None
        at += number
    return slice(begin, at)
