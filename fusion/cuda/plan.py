"""Which stretches of which tensors go where in the fusion buffer: pure functions of lengths.

The buffer is filled in pieces of at most its capacity. Every tensor begins at a
multiple of `ALIGN` elements, so that copies can move 16 bytes at a time whatever
the element size; what lies between is never read as a result. A tensor longer
than what is left of a piece goes on in the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

ALIGN = 16
"""Elements."""
CHUNK = 4096
"""Most elements that one thread block copies: four vectors of 16 bytes a thread for 4-byte elements."""
CHUNK_TYPE = np.dtype([("start", "<i8"), ("at", "<i8"), ("part", "<i4"), ("count", "<i4")])
"""`Chunk` of `copying.cu`."""

Chunks = npt.NDArray[Any]


class Piece(msgspec.Struct, frozen=True):
    """What goes through the buffer at once.

    Attributes:
        chunks: of type `CHUNK_TYPE`.
        count: elements of the buffer in use, from its beginning.
    """

    chunks: Chunks
    count: int


def pieces_of(counts: Sequence[int], capacity: int) -> list[Piece]:
    """Pieces for tensors of these lengths, in order.

    Args:
        counts: elements of each tensor.
        capacity: elements of the buffer; at least `ALIGN`.
    """
    most = capacity // ALIGN * ALIGN
    pieces: list[Piece] = []
    chunks: list[Chunks] = []
    used = 0
    for part, count in enumerate(counts):
        start = 0
        while start < count:
            used = aligned(used)
            if used >= most:
                pieces.append(Piece(np.concatenate(chunks), used))
                chunks, used = [], 0
            taken = min(count - start, most - used)
            chunks.append(_stretch(part, start, used, taken))
            start, used = start + taken, used + taken
    if chunks:
        pieces.append(Piece(np.concatenate(chunks), used))
    return pieces


def block_pieces(blocks: Sequence[tuple[int, int]], capacity: int) -> list[tuple[Piece, int, int]]:
    """Pieces of one tensor that is divided into a block for each rank.

    In a piece every rank's block has the same room, so that one reduce-scatter serves all.

    Args:
        blocks: where each block begins and ends in the tensor.
        capacity: elements of the buffer.

    Returns:
        Of each piece: itself, the room of a block, and where in the blocks it begins.
    """
    longest = max(hi - lo for lo, hi in blocks)
    room = max(ALIGN, min(aligned(longest), capacity // len(blocks) // ALIGN * ALIGN))
    pieces = []
    for at in range(0, longest, room):
        stretches = [
            _stretch(0, lo + at, block * room, min(room, hi - lo - at))
            for block, (lo, hi) in enumerate(blocks)
            if hi - lo > at
        ]
        pieces.append((Piece(np.concatenate(stretches), room * len(blocks)), room, at))
    return pieces


def stretch_chunks(start: int, count: int) -> Chunks:
    """Chunks that copy `count` elements of one tensor from `start` on to the beginning of a buffer."""
    return _stretch(0, start, 0, count)


def aligned(count: int) -> int:
    """`count` rounded up to a multiple of `ALIGN`."""
    return -(-count // ALIGN) * ALIGN


def _stretch(part: int, start: int, at: int, count: int) -> Chunks:
    offsets = np.arange(0, count, CHUNK, dtype=np.int64)
    chunks = np.empty(len(offsets), CHUNK_TYPE)
    chunks["start"] = start + offsets
    chunks["at"] = at + offsets
    chunks["part"] = part
    chunks["count"] = np.minimum(CHUNK, count - offsets)
    return chunks


def total(chunks: Iterable[Chunks]) -> int:
    """Elements that some chunks copy."""
    return sum(int(each["count"].sum()) for each in chunks)
