"""Which algorithm runs, and the pure functions behind the collectives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.messages import OpKind, Part, ReduceOp, Region, Request, Response
from fusion.collectives.broadcast import binomial
from fusion.collectives.chooser import Algorithm, choose
from fusion.collectives.doubling import peers_of, surplus_of
from fusion.collectives.node import ALIGN, ranges, slices
from fusion.collectives.reducescatter import rows_of
from fusion.collectives.ring import even_blocks

OTHERS = [OpKind.BROADCAST, OpKind.ALLGATHER, OpKind.ALLTOALL, OpKind.REDUCESCATTER, OpKind.BARRIER]


def response(
    kind: OpKind = OpKind.ALLREDUCE, region: Region | None = None, op: ReduceOp = ReduceOp.SUM
) -> Response:
    request = Request("t", kind, ("float32",), ((4,),), op=op, region=region)
    return Response(kind, "float32", (Part(request, 0),))


@pytest.mark.parametrize(
    ("nodes", "size", "hierarchy", "chosen"),
    [
        (1, 1, "auto", Algorithm.SHARED),
        (1, 1, "off", Algorithm.SHARED),
        (1, 4, "auto", Algorithm.SHARED),
        (1, 4, "on", Algorithm.SHARED),
        (2, 4, "auto", Algorithm.HIERARCHICAL),
        (2, 2, "on", Algorithm.HIERARCHICAL),
        (2, 4, "off", Algorithm.RING),
        (1, 4, "off", Algorithm.RING),
    ],
)
def test_an_allreduce_goes_by_nodes_and_setting(
    nodes: int, size: int, hierarchy: str, chosen: Algorithm
) -> None:
    assert choose(response(), nodes=nodes, size=size, hierarchy=hierarchy) == chosen


@pytest.mark.parametrize(("nodes", "hierarchy"), [(1, "auto"), (2, "on"), (2, "off")])
def test_adasum_has_one_algorithm(nodes: int, hierarchy: str) -> None:
    chosen = choose(response(op=ReduceOp.ADASUM), nodes=nodes, size=4, hierarchy=hierarchy)
    assert chosen == Algorithm.ADASUM


@pytest.mark.parametrize("hierarchy", ["auto", "on", "off"])
def test_a_bucket_in_an_arena_is_always_reduced_in_place(hierarchy: str) -> None:
    bucket = response(region=Region(0, 0))
    assert choose(bucket, nodes=2, size=4, hierarchy=hierarchy) == Algorithm.IN_PLACE


@pytest.mark.parametrize("kind", OTHERS)
def test_every_other_collective_has_an_algorithm_of_its_name(kind: OpKind) -> None:
    assert choose(response(kind), nodes=2, size=4, hierarchy="auto") == Algorithm[kind.name]


@given(st.integers(0, 10_000), st.integers(1, 9), st.sampled_from([1, 2, 4, 8]))
def test_slices_cover_everything_once_and_begin_aligned(count: int, owners: int, itemsize: int) -> None:
    cuts = slices(count, owners, itemsize)
    assert [i for lo, hi in cuts for i in range(lo, hi)] == list(range(count))
    assert all(lo * itemsize % ALIGN == 0 for lo, hi in cuts if lo < hi)


@given(st.integers(0, 1000), st.integers(1, 9))
def test_blocks_cover_everything_once_and_differ_by_at_most_one(count: int, size: int) -> None:
    blocks = even_blocks(count, size)
    assert [i for lo, hi in blocks for i in range(lo, hi)] == list(range(count))
    lengths = [hi - lo for lo, hi in blocks]
    assert max(lengths) - min(lengths) <= 1


@given(st.integers(0, 100), st.integers(0, 100), st.integers(1, 30))
def test_ranges_cover_everything_once(lo: int, length: int, most: int) -> None:
    cuts = ranges(lo, lo + length, most)
    assert [i for begin, end in cuts for i in range(begin, end)] == list(range(lo, lo + length))
    assert all(end - begin <= most for begin, end in cuts)


@given(st.integers(1, 200))
def test_the_binomial_tree_reaches_every_place_from_the_one_that_lists_it(size: int) -> None:
    for place in range(size):
        parent, children = binomial(place, size)
        assert (parent is None) == (place == 0)
        assert all(binomial(child, size)[0] == place for child in children)
    reached = sorted(child for place in range(size) for child in binomial(place, size)[1])
    assert reached == list(range(1, size))


@given(st.integers(0, 100), st.integers(1, 9))
def test_rows_are_shared_as_numpy_array_split_does(rows: int, size: int) -> None:
    import numpy as np

    assert rows_of(rows, size) == [len(part) for part in np.array_split(np.arange(rows), size)]


def test_a_codec_is_stronger_than_nodes_and_settings() -> None:
    request = Request("t", OpKind.ALLREDUCE, ("float32",), ((4,),), codec="int8")
    coded = Response(OpKind.ALLREDUCE, "float32", (Part(request, 0),))
    for nodes, hierarchy in ((1, "auto"), (2, "on"), (2, "off")):
        assert choose(coded, nodes=nodes, size=4, hierarchy=hierarchy) == Algorithm.COMPRESSED


@pytest.mark.parametrize("size", [*range(1, 18), 63, 64, 65])
def test_doubling_brings_the_part_of_every_rank_to_every_rank_once(size: int) -> None:
    surplus = surplus_of(size)
    parts = [[rank] for rank in range(size)]
    for pair in range(surplus):
        parts[2 * pair] += parts[2 * pair + 1]
    active = [rank for rank in range(size) if peers_of(rank, size) or size - surplus == 1]
    assert len(active) == size - surplus
    for step in range((size - surplus).bit_length() - 1):
        peers = {rank: peers_of(rank, size)[step] for rank in active}
        assert all(peers[peers[rank]] == rank for rank in active)
        parts = [
            parts[min(rank, peers[rank])] + parts[max(rank, peers[rank])] if rank in peers else parts[rank]
            for rank in range(size)
        ]
    for rank in active:
        assert sorted(parts[rank]) == list(range(size))
        assert parts[rank] == parts[0]
