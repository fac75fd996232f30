"""Where tensors lie in the fusion buffer of a device."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fusion.cuda.plan import ALIGN, CHUNK, block_pieces, pieces_of

counts = st.lists(st.integers(0, 3 * CHUNK), min_size=1, max_size=8)
capacities = st.integers(ALIGN, 2 * CHUNK)


@given(counts, capacities)
def test_every_element_is_copied_once_and_no_two_to_one_place(lengths: list[int], capacity: int) -> None:
    seen = [np.zeros(length, int) for length in lengths]
    for piece in pieces_of(lengths, capacity):
        taken = np.zeros(piece.count, int)
        for start, at, part, count in piece.chunks.tolist():
            seen[part][start : start + count] += 1
            taken[at : at + count] += 1
        assert piece.count <= capacity and taken.max() <= 1
    assert all((each == 1).all() for each in seen)


@given(counts, capacities)
def test_chunks_are_short_and_begin_where_sixteen_byte_accesses_can(
    lengths: list[int], capacity: int
) -> None:
    for piece in pieces_of(lengths, capacity):
        assert (piece.chunks["at"] % ALIGN == 0).all()
        assert (piece.chunks["start"] % ALIGN == 0).all()
        assert (piece.chunks["count"] > 0).all() and (piece.chunks["count"] <= CHUNK).all()


def test_small_tensors_share_a_piece() -> None:
    (piece,) = pieces_of([256] * 1000, 1 << 20)
    assert len(piece.chunks) == 1000 and piece.count == 256_000


@given(st.lists(st.integers(0, 2 * CHUNK), min_size=1, max_size=5), st.integers(5 * ALIGN, CHUNK))
def test_blocks_of_all_ranks_have_equal_room_in_every_piece(lengths: list[int], capacity: int) -> None:
    ends = np.cumsum(lengths).tolist()
    blocks = list(zip([0, *ends[:-1]], ends, strict=True))
    seen = np.zeros(ends[-1], int)
    for piece, room, begin in block_pieces(blocks, capacity):
        assert piece.count == room * len(blocks)
        for start, at, _, count in piece.chunks.tolist():
            block, inside = divmod(at, room)
            assert start == blocks[block][0] + begin + inside and inside + count <= room
            seen[start : start + count] += 1
    assert (seen == 1).all()
