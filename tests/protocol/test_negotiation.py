"""The negotiation protocol, with many simulated ranks in one process."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.messages import Request
from coordinator.negotiation import MOST_AT_ONCE, Flag
from coordinator.reports import Report, resolve
from coordinator.simulation import Fabric, submit_everywhere, tensor
from coordinator.stall import StallWatch


def in_order(rank: int, requests: list[Request]) -> list[Request]:
    return requests


def shuffled(rank: int, requests: list[Request]) -> list[Request]:
    return random.Random(rank).sample(requests, len(requests))


@pytest.mark.parametrize("size", [1, 2, 64, 1024])
def test_ranks_with_one_program_register_without_an_exchange(size: int) -> None:
    fabric = Fabric(size)
    wanted = [tensor(f"layer{index}") for index in range(20)]
    submit_everywhere(fabric, wanted, in_order)
    assert fabric.run() == wanted
    assert fabric.exchanges == 0
    assert fabric.cycles <= 3


@pytest.mark.parametrize("size", [2, 64, 1024])
def test_random_submission_orders_are_resolved_by_one_exchange(size: int) -> None:
    fabric = Fabric(size)
    wanted = [tensor(f"layer{index}") for index in range(20)]
    submit_everywhere(fabric, wanted, shuffled)
    done = fabric.run()
    assert sorted(request.name for request in done) == sorted(request.name for request in wanted)
    assert fabric.exchanges == 1


def test_a_known_set_is_ready_after_one_cycle_in_any_order() -> None:
    fabric = Fabric(64)
    wanted = [tensor(f"layer{index}") for index in range(20)]
    submit_everywhere(fabric, wanted, in_order)
    first = fabric.run()
    submit_everywhere(fabric, wanted, shuffled)
    assert fabric.cycle() == first
    assert fabric.exchanges == 0


def test_registration_does_not_depend_on_where_cycles_cut_the_stream() -> None:
    fabric = Fabric(3)
    wanted = [tensor(f"layer{index}") for index in range(30)]
    done = []
    for step in range(30):
        for rank in range(3):
            for request in wanted[max(0, step - rank) : step - rank + 1] if step >= rank else []:
                fabric.submit(rank, request)
        done += fabric.cycle()
    for rank in (1, 2):
        for request in wanted[30 - rank :]:
            fabric.submit(rank, request)
    done += fabric.run()
    assert done == wanted
    assert fabric.exchanges == 0


def test_more_requests_than_one_cycle_can_register_take_more_cycles() -> None:
    fabric = Fabric(4)
    wanted = [tensor(f"layer{index}") for index in range(3 * MOST_AT_ONCE + 5)]
    submit_everywhere(fabric, wanted, in_order)
    assert {request.name for request in fabric.run()} == {request.name for request in wanted}
    assert fabric.exchanges == 0


@pytest.mark.parametrize("size", [64, 1024])
def test_a_late_rank_holds_back_its_tensor_and_nothing_else(size: int) -> None:
    fabric = Fabric(size)
    late, other = tensor("late"), tensor("other")
    for rank in range(size):
        fabric.submit(rank, other)
        if rank != 17:
            fabric.submit(rank, late)
    assert fabric.run(10) == [other]
    fabric.submit(17, late)
    assert fabric.run(10) == [late]


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        (tensor("x", (4,)), tensor("x", (5,)), "shape (4,)"),
        (tensor("x", (2, 3)), tensor("x", (3, 2)), "shape (3, 2)"),
        (tensor("x", dtype="float32"), tensor("x", dtype="float16"), "dtype float16"),
    ],
)
def test_a_mismatch_of_one_rank_fails_the_name_on_all_and_names_both_values(
    right: Request, wrong: Request, said: str
) -> None:
    fabric = Fabric(64)
    for rank in range(64):
        fabric.submit(rank, wrong if rank == 40 else right)
        fabric.submit(rank, tensor("neighbour"))
    assert fabric.run() == [tensor("neighbour")]
    reasons = {failed["x"] for failed in fabric.failed}
    assert len(reasons) == 1
    reason = reasons.pop()
    assert "'x'" in reason and said in reason and "rank 40" in reason


def test_the_name_works_again_after_a_mismatch() -> None:
    fabric = Fabric(4)
    for rank in range(4):
        fabric.submit(rank, tensor("x", (4 + (rank == 2),)))
    fabric.run()
    submit_everywhere(fabric, [tensor("x")], in_order)
    assert fabric.run() == [tensor("x")]


def test_a_rank_that_submits_after_the_others_failed_fails_too_and_then_works() -> None:
    fabric = Fabric(3)
    fabric.submit(0, tensor("x", (4,)))
    fabric.submit(1, tensor("x", (5,)))
    fabric.submit(2, tensor("other"))
    fabric.run(5)
    assert "x" in fabric.failed[0] and "x" in fabric.failed[1] and "x" not in fabric.failed[2]
    fabric.submit(2, tensor("x", (4,)))
    assert fabric.failed[2]["x"] == fabric.failed[0]["x"]
    submit_everywhere(fabric, [tensor("x")], in_order)
    assert fabric.run(20) == [tensor("x")]


def test_two_ranks_that_disagree_are_told_when_the_last_rank_submits() -> None:
    fabric = Fabric(3)
    fabric.submit(0, tensor("x", (4,)))
    fabric.submit(1, tensor("x", (5,)))
    fabric.run(5)
    assert fabric.failed == [{}, {}, {}]
    fabric.submit(2, tensor("x", (4,)))
    fabric.run()
    assert all("rank 1" in failed["x"] for failed in fabric.failed)


def test_a_cached_name_with_another_shape_on_every_rank_runs() -> None:
    fabric = Fabric(4)
    for shape in [(4,), (5,), (4,), (5,)]:
        submit_everywhere(fabric, [tensor("metric", shape)], in_order)
        assert fabric.run() == [tensor("metric", shape)]
    assert fabric.ranks[0].registry.variants("metric") == 2


def test_a_mismatch_between_two_cached_shapes_is_found() -> None:
    fabric = Fabric(4)
    for shape in [(4,), (5,)]:
        submit_everywhere(fabric, [tensor("metric", shape)], in_order)
        fabric.run()
    for rank in range(4):
        fabric.submit(rank, tensor("metric", (4 + rank % 2,)))
    assert fabric.run() == []
    assert all("ranks 0, 2" in failed["metric"] for failed in fabric.failed)


@pytest.mark.parametrize("capacity", [0, 1, 5])
def test_eviction_is_agreed_and_loses_nothing(capacity: int) -> None:
    fabric = Fabric(4, capacity)
    wanted = [tensor(f"layer{index}") for index in range(12)]
    for _ in range(4):
        submit_everywhere(fabric, wanted, shuffled)
        assert {request.name for request in fabric.run()} == {request.name for request in wanted}
        assert len(fabric.ranks[0].registry) <= max(capacity, 0)


def test_the_least_recently_used_request_is_evicted_first() -> None:
    fabric = Fabric(2, capacity=2)
    for name in ["a", "b", "a", "c"]:
        submit_everywhere(fabric, [tensor(name)], in_order)
        fabric.run()
    registry = fabric.ranks[1].registry
    assert [registry.slot(tensor(name)) is not None for name in "abc"] == [True, False, True]


def test_every_rank_learns_who_leaves_and_why() -> None:
    fabric = Fabric(64)
    fabric.submit(5, tensor("never"))
    fabric.leave(9, "it called shutdown()")
    fabric.cycle()
    assert fabric.departed == {9: "it called shutdown()"}


def test_asking_about_a_stall_disturbs_nothing() -> None:
    fabric = Fabric(4)
    for rank in range(3):
        fabric.submit(rank, tensor("slow"))
    fabric.cycle({1: Flag.STALL})
    assert fabric.exchanges == 1
    fabric.submit(3, tensor("slow"))
    assert fabric.run() == [tensor("slow")]


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 6),
    capacity=st.integers(0, 8),
    seed=st.integers(0, 2**32),
    rounds=st.integers(1, 6),
)
def test_whatever_the_orders_and_delays_every_request_runs_once_on_all_ranks(
    size: int, capacity: int, seed: int, rounds: int
) -> None:
    chance = random.Random(seed)
    fabric = Fabric(size, capacity)
    for step in range(rounds):
        wanted = [
            tensor(f"t{index}", (1 + chance.randrange(2) * (step % 2),))
            for index in range(chance.randrange(1, 12))
        ]
        queues = [chance.sample(wanted, len(wanted)) for _ in range(size)]
        done: list[Request] = []
        for _ in range(500):
            for rank, queue in enumerate(queues):
                for _ in range(chance.randrange(3)):
                    if queue:
                        fabric.submit(rank, queue.pop())
            done += fabric.cycle()
            if not any(queues) and not any(negotiator.pending for negotiator in fabric.ranks):
                break
        assert sorted(done, key=lambda request: request.name) == sorted(
            wanted, key=lambda request: request.name
        )


def test_joined_ranks_hold_nothing_back_and_new_names_still_register() -> None:
    fabric = Fabric(4)
    submit_everywhere(fabric, [tensor("known")], in_order)
    fabric.run()
    fabric.ranks[3].join()
    fabric.cycle()
    assert fabric.ranks[0].joined == 0b1000
    for rank in range(3):
        fabric.submit(rank, tensor("known"))
        fabric.submit(rank, tensor("new"))
    assert fabric.run() == [tensor("known"), tensor("new")]


def test_a_rank_joins_only_when_nothing_of_its_own_is_pending() -> None:
    fabric = Fabric(2)
    fabric.submit(1, tensor("mine"))
    fabric.ranks[1].join()
    fabric.cycle()
    assert fabric.ranks[0].joined == 0
    fabric.submit(0, tensor("mine"))
    assert fabric.run() == [tensor("mine")]
    fabric.cycle()
    assert fabric.ranks[0].joined == 0b10


def test_what_runs_without_a_joined_rank_does_not_keep_it_from_joining_again() -> None:
    fabric = Fabric(2)
    for _ in range(2):
        fabric.ranks[1].join()
        fabric.cycle()
        assert fabric.ranks[0].joined == 0b10
        names = [tensor(str(number)) for number in range(100)]
        for each in names:
            fabric.submit(0, each)
        assert len(fabric.run()) == len(names)
        assert fabric.ranks[1].pending == 0
        fabric.ranks[0].join()
        fabric.cycle()
        assert fabric.ranks[1].joined == 0


def test_when_all_have_joined_everything_starts_afresh() -> None:
    fabric = Fabric(3)
    for rank in (2, 0, 1):
        fabric.ranks[rank].join()
        fabric.cycle()
    assert [negotiator.joined for negotiator in fabric.ranks] == [0, 0, 0]
    submit_everywhere(fabric, [tensor("next epoch")], in_order)
    assert fabric.run() == [tensor("next epoch")]


def test_messages_call_ranks_what_the_group_calls_them() -> None:
    merged = Report(
        ranks={tensor("t", (1,)): 0b001, tensor("t", (2,)): 0b110},
        ages={"t": 9.0},
        leaving={},
    )
    reason = resolve(merged, 3, ranks=(4, 6, 9)).mismatches["t"].reason
    assert "rank 4: shape (1,); ranks 6, 9: shape (2,)" in reason
    del merged.ranks[tensor("t", (2,))]
    text = StallWatch(1.0, 0.0, (4, 6, 9)).describe(merged, 3)
    assert text is not None and "submitted by rank 4, MISSING on ranks 6, 9" in text
