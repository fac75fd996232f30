"""The optimal merging is optimal, and the published rule is not."""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.planning.merging import duration, mg_wfbp, optimal

SECONDS = st.floats(0, 10, allow_nan=False)


def affine(latency: float, nbytes: list[float]):
    """A cost of `latency` and one second a byte."""
    sums = np.array([0.0, *accumulate(nbytes)])
    return lambda starts, stop: latency + sums[stop] - sums[starts]


def every_merging(count: int):
    """All ways to cut `count` neighbours into groups."""
    for cuts in range(count):
        for inner in combinations(range(1, count), cuts):
            ends = [0, *inner, count]
            yield list(pairwise(ends))


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=10), SECONDS)
def test_no_merging_is_done_earlier(tensors: list[tuple[float, float]], latency: float) -> None:
    ready = sorted(at for at, _ in tensors)
    cost = affine(latency, [size for _, size in tensors])
    groups, done = optimal(ready, cost)
    best = min(duration(other, ready, cost) for other in every_merging(len(ready)))
    assert done == pytest.approx(best)
    assert duration(groups, ready, cost) == pytest.approx(done)


@given(st.lists(st.tuples(SECONDS, st.floats(0, 3), SECONDS), min_size=1, max_size=7))
def test_it_is_exact_for_any_cost(tensors: list[tuple[float, float, float]]) -> None:
    ready = sorted(at for at, _, _ in tensors)
    table = np.random.default_rng(len(tensors)).uniform(0.1, 3, (len(ready) + 1, len(ready) + 1))
    table += tensors[0][1]

    def cost(starts, stop):
        return table[starts, stop]

    _, done = optimal(ready, cost)
    assert done == pytest.approx(min(duration(other, ready, cost) for other in every_merging(len(ready))))


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=10), SECONDS)
def test_groups_are_all_tensors_in_order(tensors: list[tuple[float, float]], latency: float) -> None:
    ready = sorted(at for at, _ in tensors)
    sizes = [size for _, size in tensors]
    for groups in (optimal(ready, affine(latency, sizes))[0], mg_wfbp(ready, [1] * len(ready), latency, 1.0)):
        assert [index for start, stop in groups for index in range(start, stop)] == list(range(len(ready)))


def test_the_published_rule_merges_a_chain_that_should_be_cut() -> None:
    ready, nbytes, latency = [0.0, 0.9, 1.8], [80, 1, 1], 1.0
    cost = affine(latency, [size / 100 for size in nbytes])
    published = mg_wfbp(ready, nbytes, latency, 0.01)
    groups, done = optimal(ready, cost)
    assert published == [(0, 3)]
    assert groups == [(0, 1), (1, 3)]
    assert duration(published, ready, cost) == pytest.approx(3.62)
    assert done == pytest.approx(2.82)


def test_the_published_rule_is_right_for_two() -> None:
    cost = affine(1.0, [0.5, 0.5])
    for second, groups in ((0.5, [(0, 2)]), (1.5, [(0, 1), (1, 2)])):
        assert mg_wfbp([0.0, second], [50, 50], 1.0, 0.01) == groups
        assert optimal([0.0, second], cost)[0] == groups


def test_all_at_once_is_merged_whole_and_free_messages_are_not_waited_for() -> None:
    assert optimal([0.0] * 5, affine(1.0, [1.0] * 5))[0] == [(0, 5)]
    assert optimal([0.0, 2.0, 4.0], affine(0.0, [1.0] * 3))[0] == [(0, 1), (1, 2), (2, 3)]


def test_a_thousand_tensors_take_no_noticeable_time() -> None:
    ready = np.linspace(0, 1, 1000).tolist()
    groups, done = optimal(ready, affine(0.01, [0.001] * 1000))
    assert 1 < len(groups) < 1000
    assert done < duration([(0, 1000)], ready, affine(0.01, [0.001] * 1000))
