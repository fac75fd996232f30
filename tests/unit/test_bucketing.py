"""The layout of static buckets: no overlaps, cache lines, one dtype, and room that no order changes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from coordinator.messages import ITEM_SIZE
from fusion.bucketing import ALIGNMENT, Bucket, Item, Layout, lay_out

dtypes = st.sampled_from(["float32", "float16", "bfloat16", "float64"])
contents = st.lists(st.tuples(dtypes, st.integers(0, 400)), min_size=1, max_size=25)
thresholds = st.integers(0, 2000)


def items_of(content: list[tuple[str, int]]) -> list[Item]:
    return [Item(key, dtype, count) for key, (dtype, count) in enumerate(content)]


def end(bucket: Bucket) -> int:
    return bucket.offset + bucket.count * ITEM_SIZE[bucket.dtype]


def occupied(layout: Layout, dtype: str) -> list[tuple[int, int]]:
    """Byte ranges of gradients and votes in the arena of a dtype, in order of their beginning."""
    size = ITEM_SIZE[dtype]
    ranges = [
        (place.offset, place.offset + place.item.count * size)
        for bucket in layout.buckets
        if bucket.dtype == dtype
        for place in bucket.places
        if place.item.count
    ]
    return sorted(ranges)


@given(contents, thresholds)
def test_every_item_has_one_place_in_a_bucket_of_its_dtype(content, threshold):
    items = items_of(content)
    layout = lay_out(items, threshold, votes=3)
    placed = [place.item for bucket in layout.buckets for place in bucket.places]
    assert sorted(placed, key=lambda item: item.key) == items
    assert all(place.item.dtype == bucket.dtype for bucket in layout.buckets for place in bucket.places)


@given(contents, thresholds)
def test_places_begin_on_cache_lines_and_do_not_overlap(content, threshold):
    layout = lay_out(items_of(content), threshold, votes=3)
    for dtype in layout.arena_bytes:
        ranges = occupied(layout, dtype)
        assert all(start % ALIGNMENT == 0 for start, _ in ranges)
        assert all(stop <= start for (_, stop), (start, _) in pairwise(ranges))


@given(contents, thresholds)
def test_buckets_hold_their_places_and_lie_in_the_arena(content, threshold):
    layout = lay_out(items_of(content), threshold, votes=3)
    for bucket in layout.buckets:
        assert end(bucket) <= layout.arena_bytes[bucket.dtype]
        for place in bucket.places:
            assert bucket.offset <= place.offset
            assert place.offset + place.item.count * ITEM_SIZE[bucket.dtype] <= end(bucket)


@given(contents, thresholds)
def test_a_bucket_of_several_gradients_is_within_the_threshold(content, threshold):
    for bucket in lay_out(items_of(content), threshold, votes=0).buckets:
        assert len(bucket.places) == 1 or end(bucket) - bucket.offset <= threshold


@given(contents, thresholds, st.integers(1, 40))
def test_the_last_bucket_ends_with_the_votes(content, threshold, votes):
    *others, last = lay_out(items_of(content), threshold, votes).buckets
    assert all(bucket.votes_at is None for bucket in others)
    assert last.votes_at is not None
    assert last.votes_at >= max(place.offset for place in last.places)
    assert last.votes_at + votes * ITEM_SIZE[last.dtype] <= end(last)


@given(contents, thresholds, st.randoms())
def test_no_order_needs_another_amount_of_memory(content, threshold, random):
    items = items_of(content)
    shuffled = list(items)
    random.shuffle(shuffled)
    assert lay_out(items, threshold, 3).arena_bytes == lay_out(shuffled, threshold, 3).arena_bytes


@given(contents, thresholds)
def test_buckets_come_in_the_order_in_which_they_fill(content, threshold):
    layout = lay_out(items_of(content), threshold, votes=3)
    filled_at = [max(place.item.key for place in bucket.places) for bucket in layout.buckets]
    assert filled_at == sorted(filled_at)


def test_dtypes_that_alternate_still_share_buckets():
    items = [Item(key, ("float16", "float32")[key % 2], 10) for key in range(40)]
    assert len(lay_out(items, 1 << 20, votes=1).buckets) == 2


def test_threshold_zero_gives_every_gradient_its_own_bucket():
    items = [Item(key, "float32", 4) for key in range(3)]
    assert [len(bucket.places) for bucket in lay_out(items, 0, votes=1).buckets] == [1, 1, 1]


def test_a_gradient_larger_than_the_threshold_goes_alone_and_its_neighbours_share():
    items = [Item(0, "float32", 4), Item(1, "float32", 1000), Item(2, "float32", 4), Item(3, "float32", 4)]
    buckets = lay_out(items, 256, votes=1).buckets
    assert [[place.item.key for place in bucket.places] for bucket in buckets] == [[0], [1], [2, 3]]


def test_nothing_to_place_gives_no_buckets():
    assert lay_out([], 100, votes=3).buckets == ()
