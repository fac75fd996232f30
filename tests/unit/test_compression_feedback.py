"""Error feedback: nothing is lost and nothing counted twice, whatever happens to buckets and steps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fusion.compression as fc
from coordinator.errors import ConfigError
from fusion.compression.exchange import Seeds, exchange
from fusion.compression.policy import check_settings, policy_from
from fusion.config import load
from tests.unit.compression_ranks import on_ranks

SIZES = {"a": 30, "b": 7, "c": 16, "d": 1}
METHODS = ["topk:0.1", "randomk:0.2", "onebit:8", "int8:block=8,feedback=on", "powersgd:1", "bf16:on"]
partitions = st.permutations(list(SIZES)).flatmap(
    lambda names: st.lists(st.integers(1, 4), min_size=1, max_size=3).map(lambda cuts: _cut(names, cuts))
)


def _cut(names: list[str], cuts: list[int]) -> list[list[str]]:
    buckets = []
    rest = list(names)
    for cut in cuts:
        buckets.append(rest[:cut])
        rest = rest[cut:]
    return [bucket for bucket in [*buckets, rest] if bucket]


def gradient(name: str, step: int, rank: int) -> torch.Tensor:
    seed = 1000 * step + 10 * rank + ord(name)
    return torch.randn(SIZES[name], generator=torch.Generator().manual_seed(seed))


def shape(name: str) -> tuple[int, ...]:
    return (5, 6) if name == "a" else (SIZES[name],)


@pytest.mark.parametrize("spec", METHODS)
@settings(max_examples=10, deadline=None)
@given(layouts=st.lists(partitions, min_size=2, max_size=4))
def test_what_arrived_and_the_last_residuals_are_what_was_given(
    spec: str, layouts: list[list[list[str]]]
) -> None:
    """Over steps in which tensors meet in other buckets each time, on two ranks."""
    compressor, size = fc.parse(spec), 2

    def work(rank: int, transport: object) -> tuple[dict[str, torch.Tensor], fc.Memories]:
        memories, arrived = fc.Memories(), {name: torch.zeros(count) for name, count in SIZES.items()}
        for step, layout in enumerate(layouts):
            for names in layout:
                info = fc.BucketInfo.of((name, shape(name)) for name in names)
                ledger = memories.open(info, feedback=True)
                bucket = ledger.buffer().copy_(torch.cat([gradient(name, step, rank) for name in names]))
                mean = exchange(compressor, bucket, info, fc.Key(step, rank), transport, ledger=ledger)
                ledger.commit()
                for piece in info.pieces:
                    arrived[piece.name] += size * piece.of(mean)
        return arrived, memories

    (arrived, mine), (_, theirs) = on_ranks(size, work)
    for name in SIZES:
        given_sum = sum(gradient(name, step, rank) for step in range(len(layouts)) for rank in range(size))
        total = arrived[name] + mine.residual(name) + theirs.residual(name)
        assert torch.allclose(total, given_sum, atol=0.1 if spec == "bf16:on" else 1e-4)


INFO = fc.BucketInfo.of([("a", (4, 5)), ("b", (10,))])


def step(ledger: fc.Ledger, values: torch.Tensor, compressor: fc.Compressor | None = None) -> torch.Tensor:
    def work(rank: int, transport: object) -> torch.Tensor:
        bucket = ledger.buffer().copy_(values)
        return exchange(compressor or fc.topk(0.1), bucket, INFO, fc.Key(0), transport, ledger=ledger)

    return on_ranks(1, work)[0]


def residuals(memories: fc.Memories) -> torch.Tensor:
    parts = [memories.residual(name) for name in "ab"]
    return torch.cat([torch.zeros(20 if n == 0 else 10) if p is None else p for n, p in enumerate(parts)])


@pytest.fixture
def memories() -> fc.Memories:
    made = fc.Memories()
    ledger = made.open(INFO, feedback=True)
    step(ledger, torch.arange(30.0))
    ledger.commit()
    return made


def test_a_step_that_is_rolled_back_leaves_no_trace(memories: fc.Memories) -> None:
    before = residuals(memories)
    ledger = memories.open(INFO, feedback=True)
    step(ledger, torch.ones(30))
    ledger.rollback()
    assert torch.equal(residuals(memories), before)
    step(ledger, torch.ones(30))
    ledger.commit()
    assert not torch.equal(residuals(memories), before)


def test_a_tensor_whose_result_nobody_used_keeps_its_residual(memories: fc.Memories) -> None:
    before = residuals(memories)
    ledger = memories.open(INFO, feedback=True)
    for _ in range(3):
        step(ledger, torch.zeros(30))
        ledger.commit([False, True])
    assert torch.equal(residuals(memories)[:20], before[:20])
    assert not torch.equal(residuals(memories)[20:], before[20:])


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_is_seen_by_everyone_and_remembered_by_nobody(
    memories: fc.Memories, bad: float
) -> None:
    before = residuals(memories)
    ledger = memories.open(INFO, feedback=True)
    values = torch.ones(30)
    values[3] = bad
    assert step(ledger, values).isnan().any()
    ledger.commit()
    assert ledger.arrived is False
    assert torch.equal(residuals(memories), before)
    assert step(ledger, torch.ones(30)).isfinite().all()


def test_a_value_beyond_float16_is_not_remembered_as_infinity() -> None:
    memories = fc.Memories()
    ledger = memories.open(INFO, feedback=True)
    assert not step(ledger, torch.full((30,), 1e6), fc.fp16(feedback=True)).isfinite().any()
    ledger.commit()
    assert not residuals(memories).any()


def test_without_feedback_nothing_is_remembered() -> None:
    memories = fc.Memories()
    ledger = memories.open(INFO, feedback=False)
    step(ledger, torch.ones(30))
    ledger.commit()
    assert memories.state_dict() == {}


def test_powersgd_remembers_where_to_start_also_without_feedback() -> None:
    memories = fc.Memories()
    step(memories.open(INFO, feedback=False), torch.randn(30), fc.powersgd(1, feedback=False))
    assert set(memories.state_dict()) == {"a"}
    assert memories.state_dict()["a"]["basis"].shape == (5, 1)


def test_a_state_is_saved_and_restored(memories: fc.Memories) -> None:
    restored = fc.Memories()
    restored.load_state_dict(memories.state_dict(), {"a": (4, 5), "b": (10,)})
    assert torch.equal(residuals(restored), residuals(memories))


def test_a_bucket_that_is_open_sees_what_is_loaded_and_what_is_forgotten(memories: fc.Memories) -> None:
    ledger = memories.open(INFO, feedback=True)
    state = memories.state_dict()
    memories.reset()
    assert torch.equal(step(ledger, torch.zeros(30)), torch.zeros(30))
    memories.load_state_dict(state)
    assert step(ledger, torch.zeros(30)).any()


def test_a_saved_state_does_not_change_afterwards(memories: fc.Memories) -> None:
    state, before = memories.state_dict(), residuals(memories)
    ledger = memories.open(INFO, feedback=True)
    for _ in range(3):
        step(ledger, torch.ones(30))
        ledger.commit()
    assert torch.equal(state["a"]["residual"], before[:20])


def test_a_residual_of_another_shape_is_refused_and_changes_nothing(memories: fc.Memories) -> None:
    before = residuals(memories)
    state = {**memories.state_dict(), "b": {"residual": torch.ones(11)}}
    with pytest.raises(
        ValueError, match=r"residual of 'b' has 11 elements, but the tensor has shape \(10,\)"
    ):
        memories.load_state_dict(state, {"a": (4, 5), "b": (10,)})
    with pytest.raises(ValueError, match="'a', which is no tensor here"):
        memories.load_state_dict(memories.state_dict(), {"b": (10,)})
    assert torch.equal(residuals(memories), before)


def test_a_tensor_that_changed_its_shape_is_refused(memories: fc.Memories) -> None:
    with pytest.raises(ValueError, match="residual of 'b' has 10 elements"):
        memories.open(fc.BucketInfo.of([("b", (11,))]), feedback=True)


@pytest.mark.parametrize("spec", METHODS)
def test_messages_to_one_receiver_lose_nothing_over_time(spec: str) -> None:
    sender, compressor = fc.Feedback(fc.parse(spec)), fc.parse(spec)
    given_sum, arrived = torch.zeros(30), torch.zeros(30)
    for seed in range(5):
        values = torch.randn(30, generator=torch.Generator().manual_seed(seed))
        given_sum += values
        arrived += compressor.decode(sender.encode(values, INFO, fc.Key(seed)), INFO)
    assert torch.allclose(arrived + residuals(sender.memories), given_sum, atol=1e-4)


def test_feedback_can_be_switched_for_each_method() -> None:
    for name, method in fc.METHODS.items():
        if name == "none":
            continue
        compressor = method(0.5) if name in ("topk", "randomk") else method()
        assert fc.with_feedback(compressor, True).feedback
        assert not fc.with_feedback(compressor, False).feedback
    assert fc.with_feedback(fc.none(), True) == fc.none()


def test_seeds_differ_by_bucket_and_by_time_and_not_by_run() -> None:
    first, second = Seeds(), Seeds()
    drawn = [first.next(name) for name in "aab"]
    assert len(set(drawn)) == 3
    assert [second.next(name) for name in "baa"] == [drawn[2], drawn[0], drawn[1]]


# Rules


def test_small_tensors_and_vectors_are_dense_unless_a_rule_is_about_them() -> None:
    policy = fc.Policy("topk:0.01", {"*.bias": "fp16", "head.*": "none", "tiny": "int8"})
    topk = fc.topk(0.01)
    assert policy.choose("body.weight", (64, 64)) == topk
    assert policy.choose("body.weight", (8, 8)) == fc.none()
    assert policy.choose("norm.weight", (4096,)) == fc.none()
    assert policy.choose("body.bias", (4096,)) == fc.fp16()
    assert policy.choose("head.weight", (64, 64)) == fc.none()
    assert policy.choose("tiny", (2,)) == fc.int8()
    assert fc.Policy("topk:0.01", dense_below=0, dense_vectors=False).choose("bias", (2,)) == topk


def test_the_first_rule_that_matches_counts() -> None:
    policy = fc.Policy(fc.topk(0.01), [("a*", "int8"), ("*", "none"), ("ab", "fp16")])
    assert policy.choose("ab", (100, 100)) == fc.int8()
    assert policy.choose("b", (100, 100)) == fc.none()


def test_policies_that_differ_do_so_in_words() -> None:
    policies = [
        fc.Policy("topk:0.01"),
        fc.Policy("topk:0.02"),
        fc.Policy("topk:0.01", {"a": "none"}),
        fc.Policy("topk:0.01", warmup_steps=3),
        fc.Policy("topk:0.01", dense_below=3),
        fc.Policy("topk:0.01", dense_vectors=False),
        fc.Policy("topk:0.01,feedback=off"),
    ]
    assert len({policy.terms for policy in policies}) == len(policies)


@pytest.mark.parametrize("bad", [{"rules": {"*": "nothing"}}, {"dense_below": -1}, {"warmup_steps": 1.5}])
def test_a_policy_with_a_bad_value_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"nothing|dense_below|warmup_steps"):
        fc.Policy("int8", **bad)


# Settings


def test_settings_make_a_policy() -> None:
    environ = {
        "FUSION_COMPRESSION": "powersgd:2",
        "FUSION_COMPRESSION_RULES": '{"head.*": "none"}',
        "FUSION_COMPRESSION_WARMUP_STEPS": "5",
    }
    policy = policy_from(load(environ=environ).config)
    assert policy == fc.Policy("powersgd:2", {"head.*": "none"}, warmup_steps=5)
    assert not policy_from(load(environ={}).config).compresses


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compression": "zip"}, "argument: compression: there is no compressor 'zip'"),
        ({"compression": "topk:2"}, "argument: compression: topk: ratio is"),
        ({"compression_rules": {"*": "zip"}}, "argument: compression_rules: there is no compressor 'zip'"),
    ],
)
def test_a_setting_that_names_no_compressor_is_refused_with_its_place(settings: dict, message: str) -> None:
    loaded = load(environ={}, **settings)
    with pytest.raises(ConfigError, match=message):
        check_settings(loaded.config, loaded.origins)


def test_rules_that_are_no_mapping_are_refused() -> None:
    with pytest.raises(ConfigError, match="compression_rules must be a mapping from patterns"):
        load(environ={"FUSION_COMPRESSION_RULES": "head.*"})
