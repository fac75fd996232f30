"""Predicted steps: stories short enough to be worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.planner import BLOCK
from fusion.planning.costs import Costs, Curve
from fusion.planning.prediction import Settings, best_merging, buffer_bytes, predict, published_merging
from fusion.planning.report import make_plan
from fusion.planning.workload import PlanError, Tensor, Workload, make

MIB = 1 << 20
BYTE_S = 1e-8
SLOPES = (BYTE_S,) * 4


def curve(**changed: float) -> Curve:
    return Curve(
        **{"wait_s": 0.0, "cycle_s": 0.0, "response_s": 0.0, "tensor_s": 0.0, "slopes": SLOPES, **changed}
    )


def costs(found: Curve, nodes: tuple[int, ...] = (1, 1)) -> Costs:
    return Costs(nodes, "auto", MIB, found, found)


def layers(
    number: int, *, nbytes: int = MIB, every_s: float = 0.01, backward_s: float | None = None
) -> Workload:
    """One tensor every so often, the first after `every_s`."""
    tensors = [Tensor(f"t{n}", nbytes // 4, "float32", (n + 1) * every_s) for n in range(number)]
    return make("layers", tensors, backward_s=backward_s)


def settings(threshold_mb: float, buckets: str = "static", cycle_s: float = 0.0) -> Settings:
    return Settings(threshold_mb, cycle_s, buckets)  # type: ignore[arg-type]


VOTES = 4 * 4 + 4 * 4
"""Bytes of the votes for four tensors."""


def test_one_bucket_leaves_at_the_end_of_the_pass() -> None:
    found = predict(layers(4), costs(curve(response_s=1e-3)), settings(64))
    assert found.buckets == 1
    assert found.step_s == pytest.approx(0.04 + 1e-3 + 4 * MIB * BYTE_S, rel=1e-3)
    assert found.exposed_s == pytest.approx(1e-3 + 4 * MIB * BYTE_S, rel=1e-3)


def test_small_buckets_overlap_with_the_pass() -> None:
    """A transfer takes 10.5 ms and a layer 10, so that each waits for the one before a little longer."""
    found = predict(layers(4), costs(curve()), settings(1))
    assert found.buckets == 4
    assert found.step_s == pytest.approx(0.01 + 4 * MIB * BYTE_S, rel=1e-3)


def test_a_burst_of_thousands_is_planned_in_blocks_as_the_runtime_does() -> None:
    burst = layers(2 * BLOCK + 1, nbytes=4, every_s=0.0)
    assert predict(burst, costs(curve()), settings(64, "dynamic")).buckets == 3


def test_dynamic_buckets_take_what_became_ready_while_the_channel_was_busy() -> None:
    found = predict(layers(4, nbytes=4 * MIB), costs(curve()), settings(64, "dynamic"))
    # 42 ms for the first, in which the other three, and the votes, become ready.
    assert found.groups == (1, 3)
    assert found.step_s == pytest.approx(0.01 + (16 * MIB + VOTES) * BYTE_S)


def test_a_cycle_waits_for_its_time_unless_the_buffer_is_full() -> None:
    slow = predict(layers(4), costs(curve()), settings(64, "dynamic", cycle_s=0.025))
    assert slow.groups == (3, 1)
    full = predict(layers(4), costs(curve()), settings(1, "dynamic", cycle_s=0.025))
    assert full.groups == (1, 1, 1, 1)


def test_the_end_of_the_pass_ends_the_wait() -> None:
    found = predict(layers(2), costs(curve()), settings(64, "dynamic", cycle_s=10.0))
    assert found.cycles == 1
    assert found.step_s < 0.1


def test_without_fusion_every_tensor_is_a_bucket() -> None:
    found = predict(layers(5), costs(curve()), settings(0, "dynamic"))
    assert found.buckets == 5 + 1  # the votes
    assert found.groups == (1,) * 5


def test_one_cycle_carries_several_buckets() -> None:
    at_once = layers(4, every_s=0.0, backward_s=0.0)
    found = predict(at_once, costs(curve(cycle_s=0.5)), settings(1, "dynamic"))
    assert (found.cycles, found.buckets) == (1, 5)
    assert found.step_s == pytest.approx(0.5 + (4 * MIB + VOTES) * BYTE_S)


def test_dtypes_do_not_share_a_bucket() -> None:
    tensors = [Tensor(f"t{n}", 256, dtype) for n, dtype in enumerate(["float32", "bfloat16"] * 3)]
    found = predict(make("mixed", tensors), costs(curve()), settings(64, "dynamic"))
    assert found.buckets == 2


def test_computing_and_reducing_slow_each_other_down() -> None:
    shared = curve(compute_stretch=2.0, transfer_stretch=1.5)
    work = make("one", [Tensor("t", 10 * MIB // 4, "float32", 0.0)], backward_s=1.0)
    found = predict(work, costs(shared), settings(64, "dynamic"))
    reducing = 10 * MIB * BYTE_S
    # While reducing, the pass does half of its work, so it ends that much later.
    assert found.step_s == pytest.approx(1.0 + 1.5 * reducing / 2, rel=1e-3)


def test_latency_while_computing_is_its_own_figure() -> None:
    late = curve(response_s=0.1, latency_stretch=3.0, transfer_stretch=1.0)
    work = make("one", [Tensor("t", 1, "float32", 0.0)], backward_s=0.2)
    found = predict(work, costs(late), settings(64, "dynamic"))
    # Two thirds of the response are done when the pass ends; the votes follow.
    assert found.step_s == pytest.approx(0.2 + 0.1 / 3 + 0.1, rel=1e-3)


def test_hooks_lengthen_the_pass_and_settling_follows_it() -> None:
    found = predict(layers(4), costs(curve(hook_s=1e-3, settle_s=2e-3)), settings(64))
    assert found.step_s == pytest.approx(0.04 + 4e-3 + 4 * MIB * BYTE_S + 8e-3, rel=1e-3)


@given(
    st.lists(st.tuples(st.floats(0, 0.1), st.integers(1, 1 << 20)), min_size=1, max_size=12),
    st.floats(1e-5, 1e-2),
    st.sampled_from(["dynamic", "static"]),
)
def test_no_threshold_beats_the_optimal_merging(
    tensors: list[tuple[float, int]], latency: float, buckets: str
) -> None:
    """With no cost of a cycle of its own: several buckets in one cycle are no way to win."""
    work = make("any", [Tensor(f"t{n}", count, "float32", at) for n, (at, count) in enumerate(tensors)])
    found = costs(curve(response_s=latency))
    optimal = best_merging(work, found, buckets)  # type: ignore[arg-type]
    for threshold in (0.0, 0.5, 1.0, 64.0):
        assert optimal.step_s <= predict(work, found, settings(threshold, buckets)).step_s + 1e-9
    assert optimal.step_s <= published_merging(work, found, buckets).step_s + 1e-9  # type: ignore[arg-type]


def test_optimal_groups_cover_all_tensors() -> None:
    plan = make_plan(layers(9), costs(curve(response_s=5e-3)), settings(64))
    assert [name for group in plan.groups() for name in group] == [f"t{n}" for n in range(9)]
    assert sum(plan.optimal.groups) == 9


def test_the_best_threshold_is_the_smallest_of_equals() -> None:
    at_once = layers(4, every_s=0.0, backward_s=0.0)
    plan = make_plan(at_once, costs(curve(response_s=0.1)), settings(128), (1.0, 4.0, 8.0, 64.0))
    # Four tensors of 1 MiB and the votes: 4 MiB hold the tensors, and votes ride beyond the threshold.
    assert plan.best.threshold_mb == 4.0
    assert [found.threshold_mb for found in plan.predictions] == [1.0, 4.0, 8.0, 64.0, 128.0]


def test_one_rank_has_nothing_to_plan() -> None:
    with pytest.raises(PlanError, match="one rank"):
        make_plan(layers(2), costs(curve(), nodes=(1,)), settings(64))


def test_buffers_between_nodes_grow_with_the_threshold_and_inside_a_node_do_not() -> None:
    assert buffer_bytes(costs(curve(), (2,)), 64) == buffer_bytes(costs(curve(), (2,)), 8) == 2 * MIB
    assert buffer_bytes(costs(curve(), (1, 1)), 64) == (2 + 64) * MIB
    assert buffer_bytes(costs(curve(), (1, 1)), 0) == (2 + 8) * MIB
    assert buffer_bytes(costs(curve(), (2, 2)), 64) == (2 + 32) * MIB
