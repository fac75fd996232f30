"""Where each gradient lies in the static buckets: a pure function of the order.

Gradients lie back to back in buckets, each bucket of one dtype and at most a
threshold long, all buckets of one dtype in one arena. Every gradient starts on a
cache line, so that no reader or vector unit meets two gradients in one; the
padding in between holds zeros and stays zero under a sum.

Guarantee: the bytes an arena needs do not depend on the order, so buckets can be
laid out anew in the arena they have.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from coordinator.messages import ITEM_SIZE

ALIGNMENT = 64
"""Bytes of a cache line; a multiple of every item size."""


class Item(msgspec.Struct, frozen=True):
    """One gradient to place."""

    key: int
    dtype: str
    count: int
    """Elements."""


class Place(msgspec.Struct, frozen=True):
    """Where an item lies."""

    item: Item
    offset: int
    """First byte in the arena."""


class Bucket(msgspec.Struct, frozen=True):
    """Gradients that are reduced together."""

    dtype: str
    offset: int
    """First byte in the arena."""
    count: int
    """Elements, padding and votes included."""
    places: tuple[Place, ...]
    votes_at: int | None = None
    """First byte of the votes in the arena, for the one bucket that carries them."""


class Layout(msgspec.Struct, frozen=True):
    """All buckets, in the order they are expected to fill."""

    buckets: tuple[Bucket, ...]
    arena_bytes: dict[str, int]
    """dtype -> bytes of its arena."""


def lay_out(items: Sequence[Item], threshold: int, votes: int) -> Layout:
    """Place items in the order given, in buckets of at most `threshold` bytes.

    An item larger than the threshold has a bucket of its own. The last bucket
    carries `votes` more elements at its end, beyond the threshold if need be.

    Args:
        items: what to place, in the order in which it is expected to be ready.
        threshold: bytes of a bucket; 0 gives every item its own.
        votes: elements that ride in the last bucket.
    """
    runs = _split(items, threshold)
    offsets = dict.fromkeys((item.dtype for item in items), 0)
    buckets = []
    for position, run in enumerate(runs):
        last = position == len(runs) - 1
        bucket = _place(run, offsets[run[0].dtype], votes if last else None)
        offsets[bucket.dtype] = bucket.offset + bucket.count * ITEM_SIZE[bucket.dtype]
        buckets.append(bucket)
    room = {
        dtype: sum(_padded(item) for item in items if item.dtype == dtype) + aligned(votes * ITEM_SIZE[dtype])
        for dtype in offsets
    }
    return Layout(tuple(buckets), room)


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to whole cache lines."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _padded(item: Item) -> int:
    return aligned(item.count * ITEM_SIZE[item.dtype])


def _split(items: Sequence[Item], threshold: int) -> list[list[Item]]:
    """Cut the order into runs that fit; a dtype in between does not end a run."""
    runs: list[list[Item]] = []
    open_runs: dict[str, tuple[list[Item], int]] = {}
    for item in items:
        run, filled = open_runs.get(item.dtype, ([], 0))
        if not run or filled + _padded(item) > threshold:
            run, filled = [], 0
            runs.append(run)
        run.append(item)
        open_runs[item.dtype] = (run, filled + _padded(item))
    # A run is complete when its last item is, so that is where it stands in the order.
    position = {item.key: index for index, item in enumerate(items)}
    return sorted(runs, key=lambda run: position[run[-1].key])


def _place(run: Sequence[Item], start: int, votes: int | None) -> Bucket:
    places = []
    offset = start
    for item in run:
        places.append(Place(item, offset))
        offset += _padded(item)
    votes_at = None
    size = ITEM_SIZE[run[0].dtype]
    if votes is not None:
        votes_at = offset
        offset += aligned(votes * size)
    return Bucket(run[0].dtype, start, (offset - start) // size, tuple(places), votes_at)
