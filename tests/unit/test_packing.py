"""Packing: any set of tensors, any cut of the flat buffer, any strides."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from coordinator.executor import Entry
from coordinator.handle import Bell, Handle
from coordinator.messages import OpKind, Part, Request, Response
from fusion.packing import Layout, LayoutCache, Piece, Span, Tensors, Window

shapes_of = st.lists(st.lists(st.integers(0, 5), max_size=4).map(tuple), min_size=1, max_size=8)
STRIDES = ("contiguous", "reversed dimensions", "every second")


def strided(tensor: torch.Tensor, how: str) -> torch.Tensor:
    """The same values at the same indices, with other strides."""
    if how == "reversed dimensions":
        backwards = list(reversed(range(tensor.dim())))
        return tensor.permute(backwards).contiguous().permute(backwards)
    if how == "every second" and tensor.dim():
        return torch.stack([tensor, torch.full_like(tensor, -1.0)], -1).flatten(-2)[..., ::2]
    return tensor


def response_of(shapes: Sequence[tuple[int, ...]]) -> Response:
    requests = [Request(f"t{i}", OpKind.ALLREDUCE, ("float32",), (shape,)) for i, shape in enumerate(shapes)]
    return Response(OpKind.ALLREDUCE, "float32", tuple(Part(request, 0) for request in requests))


def tensors_of(layout: Layout, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> Tensors:
    entries = [
        Entry(part.request, [tensor], [output], Handle(part.request.name, Bell()), enqueued_at=0.0)
        for part, tensor, output in zip(layout.response.parts, inputs, outputs, strict=True)
    ]
    return Tensors(layout, entries)


def inputs_of(
    shapes: Sequence[tuple[int, ...]], how: Sequence[str]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """0, 1, 2, ... laid into tensors of these shapes, and the flat buffer they make."""
    layout = Layout(response_of(shapes))
    flat = torch.arange(layout.total, dtype=torch.float32)
    pieces = flat.split(layout.counts)
    tensors = [
        strided(piece.view(shape), kind) for piece, shape, kind in zip(pieces, shapes, how, strict=True)
    ]
    return flat, tensors


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], list[str], list[int]]:
    """Shapes, strides for each, and where to cut the flat buffer."""
    shapes = draw(shapes_of)
    how = draw(st.lists(st.sampled_from(STRIDES), min_size=len(shapes), max_size=len(shapes)))
    total = Layout(response_of(shapes)).total
    cuts = draw(st.lists(st.integers(0, total), max_size=4))
    return shapes, how, [0, *sorted(cuts), total]


@given(cases())
def test_packed_ranges_are_the_tensors_back_to_back_in_logical_order(
    case: tuple[list[tuple[int, ...]], list[str], list[int]],
) -> None:
    shapes, how, cuts = case
    layout = Layout(response_of(shapes))
    flat, inputs = inputs_of(shapes, how)
    tensors = tensors_of(layout, inputs, inputs)
    for lo, hi in pairwise(cuts):
        memory = torch.full((hi - lo,), -2.0)
        Window(layout, [Span(lo, memory)]).pack(tensors)
        assert torch.equal(memory, flat[lo:hi])


@given(cases())
def test_unpacked_ranges_fill_the_outputs_and_nothing_else(
    case: tuple[list[tuple[int, ...]], list[str], list[int]],
) -> None:
    shapes, how, cuts = case
    layout = Layout(response_of(shapes))
    flat, expected = inputs_of(shapes, ["contiguous"] * len(shapes))
    outputs = [strided(torch.zeros(shape), kind) for shape, kind in zip(shapes, how, strict=True)]
    strides = [output.stride() for output in outputs]
    tensors = tensors_of(layout, expected, outputs)
    for lo, hi in pairwise(cuts):
        Window(layout, [Span(lo, flat[lo:hi])]).unpack(tensors)
    tensors.flush()
    for output, stride, right, kind in zip(outputs, strides, expected, how, strict=True):
        assert torch.equal(output, right) and output.stride() == stride
        if kind == "every second" and output.dim() and output.numel():
            between = output.as_strided(output.shape, output.stride(), output.storage_offset() + 1)
            assert (between == -1.0).all()


@given(cases())
def test_a_range_may_lie_in_several_memories(
    case: tuple[list[tuple[int, ...]], list[str], list[int]],
) -> None:
    shapes, how, cuts = case
    layout = Layout(response_of(shapes))
    flat, inputs = inputs_of(shapes, how)
    outputs = [torch.zeros(shape) for shape in shapes]
    tensors = tensors_of(layout, inputs, outputs)
    spans = [Span(lo, torch.empty(hi - lo)) for lo, hi in pairwise(cuts)]
    window = Window(layout, spans)
    window.pack(tensors)
    assert torch.equal(torch.cat([span.memory for span in spans]), flat)
    window.unpack(tensors)
    tensors.flush()
    assert all(torch.equal(output, tensor) for output, tensor in zip(outputs, inputs, strict=True))


@given(cases())
def test_pieces_cover_a_range_once_and_in_order(
    case: tuple[list[tuple[int, ...]], list[str], list[int]],
) -> None:
    shapes, _, cuts = case
    layout = Layout(response_of(shapes))
    for lo, hi in pairwise(cuts):
        at = 0
        for piece in layout.pieces(lo, hi):
            assert piece.at == at and piece.stop > piece.start
            assert layout.ends[piece.part] - layout.counts[piece.part] + piece.start == lo + at
            at += piece.stop - piece.start
        assert at == hi - lo


def test_tensors_without_elements_have_no_piece() -> None:
    layout = Layout(response_of([(0, 3), (2,), (0,), (1,), (0,)]))
    assert list(layout.pieces(0, 3)) == [Piece(1, 0, 2, 0, whole=True), Piece(3, 0, 1, 2, whole=True)]


def test_a_piece_knows_whether_it_is_the_whole_tensor() -> None:
    layout = Layout(response_of([(4,), (4,)]))
    assert [piece.whole for piece in layout.pieces(0, 6)] == [True, False]


def test_a_tensor_cut_between_two_memories_is_not_taken_for_two_whole_ones() -> None:
    # As many pieces as parts: one has two, one none.
    shapes = [(2,), (4,), (0,), (2,)]
    layout = Layout(response_of(shapes))
    flat, inputs = inputs_of(shapes, ["contiguous"] * 4)
    outputs = [torch.zeros(shape) for shape in shapes]
    window = Window(layout, [Span(0, flat[:4].clone()), Span(4, flat[4:].clone())])
    window.unpack(tensors_of(layout, inputs, outputs))
    assert all(torch.equal(output, tensor) for output, tensor in zip(outputs, inputs, strict=True))


def test_names_of_a_range_come_once_each_in_order() -> None:
    request = Request("group", OpKind.ALLREDUCE, ("int8", "int8"), ((2,), (2,)))
    other = Request("other", OpKind.ALLREDUCE, ("int8",), ((2,),))
    parts = (Part(request, 0), Part(request, 1), Part(other, 0))
    layout = Layout(Response(OpKind.ALLREDUCE, "int8", parts))
    assert layout.names(0, 6) == ("group", "other")
    assert layout.names(5, 6) == ("other",)


def test_the_cache_gives_the_same_layout_for_the_same_response() -> None:
    cache = LayoutCache()
    response = response_of([(1,)])
    assert cache.get(response) is cache.get(response)
    assert cache.get(response) is not cache.get(response_of([(1,)]))


def test_the_cache_drops_the_least_recently_used_beyond_its_parts() -> None:
    cache = LayoutCache(most_parts=4)
    first, second, third = (response_of([(1,), (2,)]) for _ in range(3))
    kept, dropped = cache.get(first), cache.get(second)
    cache.get(first)
    cache.get(third)
    assert cache.get(first) is kept
    assert cache.get(second) is not dropped


def test_a_response_larger_than_the_cache_still_works() -> None:
    cache = LayoutCache(most_parts=1)
    response = response_of([(1,), (2,)])
    assert cache.get(response).total == 3
