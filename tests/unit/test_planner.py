"""Which tensors share a fusion buffer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator import planner
from coordinator.messages import OpKind, ReduceOp, Request
from coordinator.planner import PlanCache, blocks, fuse
from coordinator.registry import Registry


def request(name: str, count: int = 4, dtype: str = "float32", **options: object) -> Request:
    kind = options.pop("kind", OpKind.ALLREDUCE)
    return Request(name, kind, (dtype,), ((count,),), **{"op": ReduceOp.SUM, **options})


def planned(requests: list[Request], threshold: int) -> list[str]:
    """The names in each response."""
    return ["".join(part.request.name for part in response.parts) for response in fuse(requests, threshold)]


def test_a_buffer_is_filled_up_to_the_threshold_and_not_beyond() -> None:
    requests = [request(name) for name in "abcde"]
    assert planned(requests, 32) == ["ab", "cd", "e"]
    assert planned(requests, 33) == ["ab", "cd", "e"]
    assert planned(requests, 31) == ["a", "b", "c", "d", "e"]
    assert planned(requests, 80) == ["abcde"]


def test_threshold_zero_fuses_nothing() -> None:
    assert planned([request("a", 0), request("b"), request("c")], 0) == ["a", "b", "c"]


def test_a_tensor_larger_than_the_buffer_goes_alone_and_the_small_ones_still_share() -> None:
    requests = [request("a"), request("B", 1000), request("c"), request("d")]
    assert planned(requests, 64) == ["a", "B", "cd"]


def test_dtypes_that_alternate_share_one_buffer_each() -> None:
    dtypes = ("float16", "float32", "int64", "bfloat16")
    requests = [request(f"{index:02}", dtype=dtypes[index % 4]) for index in range(40)]
    responses = fuse(requests, 1 << 20)
    assert [response.dtype for response in responses] == list(dtypes)
    assert [len(response.parts) for response in responses] == [10] * 4


def test_what_is_computed_differently_never_shares() -> None:
    requests = [
        request("a"),
        request("b", op=ReduceOp.MAX),
        request("c", prescale=0.5),
        request("d", postscale=0.5),
        request("e", kind=OpKind.BROADCAST, root_rank=0),
        request("f"),
    ]
    assert planned(requests, 1 << 20) == ["af", "b", "c", "d", "e"]


def test_adasum_and_what_only_moves_rows_go_alone() -> None:
    requests = [request(name, op=ReduceOp.ADASUM) for name in "ab"]
    requests += [request(name, kind=OpKind.ALLGATHER) for name in "cd"]
    assert planned(requests, 1 << 20) == ["a", "b", "c", "d"]


def test_a_request_with_a_codec_is_a_bucket_by_itself_however_large() -> None:
    group = Request(
        "g", OpKind.ALLREDUCE, ("float32", "float16", "float32"), ((4,),) * 3, codec="topk:ratio=0.1"
    )
    responses = fuse([request("a", codec="int8"), group, request("b", codec="int8"), request("c")], 8)
    assert [[(part.request.name, part.index) for part in response.parts] for response in responses] == [
        [("a", 0)],
        [("g", 0), ("g", 2)],
        [("g", 1)],
        [("b", 0)],
        [("c", 0)],
    ]


@pytest.fixture
def plans() -> PlanCache:
    registry = Registry(100)
    for name in "abcdef":
        registry.add(request(name))
    return PlanCache(registry, 1 << 20)


def test_a_set_that_comes_again_has_the_same_plan(plans: PlanCache) -> None:
    responses, _ = plans.get((0, 1, 2))
    assert plans.get((3,))[0][0].names == ("d",)
    assert plans.get((0, 1, 2))[0] is responses


def test_plans_of_many_slots_are_dropped_least_recently_used_first(
    plans: PlanCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "_MOST_PLANNED", 5)
    first, second = plans.get((0, 1))[0], plans.get((2, 3))[0]
    assert plans.get((0, 1))[0] is first
    plans.get((4, 5))
    assert plans.get((0, 1))[0] is first
    assert plans.get((2, 3))[0] is not second


def test_a_plan_larger_than_all_that_is_kept_is_made(
    plans: PlanCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "_MOST_PLANNED", 2)
    assert plans.get((0, 1, 2))[0][0].names == ("a", "b", "c")


def test_a_large_set_is_planned_in_blocks_that_recur_wherever_it_is_cut(
    plans: PlanCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "BLOCK", 2)
    responses, slots = plans.get((0, 1, 2, 3, 5))
    assert [response.names for response in responses] == [("a", "b"), ("c", "d"), ("f",)]
    assert slots.tolist() == [0, 1, 2, 3, 5]
    again, _ = plans.get((1, 2, 3, 4))
    assert [response.names for response in again] == [("b",), ("c", "d"), ("e",)]
    assert again[1] is responses[1]


@given(st.sets(st.integers(0, 60), min_size=1))
def test_blocks_are_the_set_in_order_cut_at_fixed_slots(ready: set[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "BLOCK", 8)
        found = blocks(tuple(sorted(ready)))
    assert [slot for run in found for slot in run] == sorted(ready)
    numbers = [{slot // 8 for slot in run} for run in found]
    if len(ready) > 8:
        assert all(len(number) == 1 for number in numbers)
        assert len(set.union(*numbers)) == len(found)
    else:
        assert len(found) == 1
