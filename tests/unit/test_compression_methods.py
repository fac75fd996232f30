"""What each compressor promises: its bytes, its error, its expectation, its determinism."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fusion.compression as fc
from fusion.compression.topk import largest
from tests.unit.compression_ranks import on_ranks

ALL = [
    "none",
    "fp16",
    "bf16",
    "int8",
    "int8:block=16,rounding=nearest",
    "onebit:block=16",
    "terngrad",
    "terngrad:clip=0",
    "topk:0.1",
    "randomk:0.1",
    "randomk:0.1,feedback=off",
    "powersgd:2",
]
every_method = pytest.mark.parametrize("spec", ALL)
shapes = st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=5)
KEY = fc.Key(7, 1)


def info_of(*shapes: tuple[int, ...]) -> fc.BucketInfo:
    return fc.BucketInfo.of((f"t{number}", shape) for number, shape in enumerate(shapes))


INFO = info_of((20, 30), (7,), (6, 2, 3), ())


def values_of(info: fc.BucketInfo, seed: int = 0) -> torch.Tensor:
    return torch.randn(info.count, generator=torch.Generator().manual_seed(seed))


def sent(
    compressor: fc.Compressor, values: torch.Tensor, info: fc.BucketInfo, key: fc.Key = KEY
) -> torch.Tensor:
    """What arrives of a bucket."""
    return compressor.decode(compressor.encode(values, info, key), info)


@every_method
def test_a_specification_can_be_read_back(spec: str) -> None:
    compressor = fc.parse(spec)
    assert fc.parse(compressor.spec) == compressor


@every_method
@settings(max_examples=20, deadline=None)
@given(shapes=shapes)
def test_a_payload_has_exactly_the_bytes_that_are_stated(spec: str, shapes: list[list[int]]) -> None:
    compressor, info = fc.parse(spec), info_of(*map(tuple, shapes))
    if info.count:
        payload = compressor.encode(values_of(info), info, KEY)
        assert payload.dtype == torch.uint8
        assert len(payload) == compressor.payload_bytes(info)
        assert len(compressor.decode(payload, info)) == info.count


@every_method
def test_what_is_sent_has_the_bytes_that_are_stated_but_for_padding_and_a_seed(spec: str) -> None:
    def work(rank: int, transport: object) -> int:
        fc.parse(spec).reduce(values_of(INFO, rank), INFO, fc.Key(7, rank), transport)
        return transport.sent

    for nbytes in on_ranks(2, work):
        assert 0 <= fc.parse(spec).payload_bytes(INFO) - nbytes < 16


@every_method
def test_the_input_is_only_read(spec: str) -> None:
    values = values_of(INFO)
    fc.parse(spec).encode(values, INFO, KEY)
    assert torch.equal(values, values_of(INFO))


@every_method
def test_the_same_input_and_key_give_the_same_bytes(spec: str) -> None:
    first, second = (fc.parse(spec).encode(values_of(INFO), INFO, KEY) for _ in range(2))
    assert torch.equal(first, second)


@every_method
def test_the_global_generators_are_left_alone(spec: str) -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    fc.parse(spec).encode(values_of(INFO), INFO, KEY)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("spec", ["int8", "terngrad"])
def test_ranks_round_by_random_numbers_of_their_own(spec: str) -> None:
    payloads = [fc.parse(spec).encode(values_of(INFO), INFO, fc.Key(7, rank)) for rank in (0, 1)]
    assert not torch.equal(*payloads)


@every_method
def test_zeros_stay_zeros(spec: str) -> None:
    assert not sent(fc.parse(spec), torch.zeros(INFO.count), INFO).any()


@every_method
def test_what_is_not_a_number_does_not_become_one(spec: str) -> None:
    assert sent(fc.parse(spec), torch.full((INFO.count,), float("nan")), INFO).isnan().any()


@every_method
@pytest.mark.parametrize("size", [1, 3])
def test_what_got_across_and_what_did_not_add_up_to_what_was_given(spec: str, size: int) -> None:
    def work(rank: int, transport: object) -> tuple[torch.Tensor, torch.Tensor]:
        values = values_of(INFO, rank)
        mean = fc.parse(spec).reduce(values, INFO, fc.Key(7, rank), transport)
        return mean, values

    results = on_ranks(size, work)
    given = sum(values_of(INFO, rank) for rank in range(size))
    left = sum(values for _, values in results)
    tolerance = 0.05 if "16" in spec and spec[0] != "o" and "int8" not in spec else 1e-4
    assert torch.allclose(size * results[0][0] + left, given, atol=tolerance)
    assert all(torch.equal(mean, results[0][0]) for mean, _ in results)


@pytest.mark.parametrize(
    "spec", ["int8:block=16,rounding=nearest", "onebit:block=16", "topk:0.1", "terngrad"]
)
def test_the_mean_of_gathered_buckets_is_that_of_what_each_sent(spec: str) -> None:
    def work(rank: int, transport: object) -> torch.Tensor:
        return fc.parse(spec).reduce(values_of(INFO, rank), INFO, fc.Key(7, rank), transport)

    parts = [sent(fc.parse(spec), values_of(INFO, rank), INFO, fc.Key(7, rank)) for rank in range(3)]
    assert torch.allclose(on_ranks(3, work)[0], sum(parts) / 3, atol=1e-6)


@pytest.mark.parametrize("spec", ["int8:block=16", "terngrad:clip=0", "randomk:0.25,feedback=off"])
def test_methods_that_claim_it_are_unbiased(spec: str) -> None:
    compressor, info = fc.parse(spec), info_of((4, 10))
    assert compressor.unbiased
    values = values_of(info)
    draws = torch.stack([sent(compressor, values, info, fc.Key(seed)) for seed in range(4000)])
    error = (draws.mean(0) - values).abs()
    assert (error <= 5 * draws.std(0) / 4000**0.5 + 1e-6).all()


@pytest.mark.parametrize("spec", ["onebit:block=16", "topk:0.1", "randomk:0.1", "powersgd:2", "int8", "fp16"])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), zeros=st.floats(0, 0.99))
def test_methods_for_feedback_never_lose_more_than_there_was(spec: str, seed: int, zeros: float) -> None:
    values = values_of(INFO, seed)
    values[torch.rand(INFO.count, generator=torch.Generator().manual_seed(seed)) < zeros] = 0
    lost = values - sent(fc.parse(spec), values, INFO, fc.Key(seed))
    assert float(lost.norm()) <= float(values.norm()) * (1 + 1e-5)


# int8


@pytest.mark.parametrize(("rounding", "steps"), [("nearest", 0.5), ("stochastic", 1.0)])
@given(seed=st.integers(0, 1000), scale=st.floats(1e-20, 1e20))
@settings(max_examples=25, deadline=None)
def test_int8_is_off_by_at_most_a_share_of_its_step(
    rounding: str, steps: float, seed: int, scale: float
) -> None:
    info, block = info_of((50,)), 16
    values = values_of(info, seed) * scale
    error = (sent(fc.int8(block=block, rounding=rounding), values, info) - values).abs()
    for row in range(0, 50, block):
        step = float(values[row : row + block].abs().max()) / 127
        assert float(error[row : row + block].max()) <= steps * step * 1.001


# topk and randomk


@given(
    values=st.lists(st.integers(-4, 4), min_size=1, max_size=60),
    count=st.integers(1, 60),
)
def test_topk_picks_the_largest_and_of_equal_ones_the_first(values: list[int], count: int) -> None:
    count = min(count, len(values))
    expected = sorted(range(len(values)), key=lambda index: (-abs(values[index]), index))[:count]
    assert largest(torch.tensor(values, dtype=torch.float32), count).tolist() == sorted(expected)


@pytest.mark.parametrize("count", [1, 2000, 30000, 180000])
@pytest.mark.parametrize("kind", ["normal", "mostly zero", "all equal", "a few large in one place"])
def test_topk_of_a_large_bucket_is_exact(count: int, kind: str) -> None:
    values = torch.randn(200_000, generator=torch.Generator().manual_seed(1))
    if kind == "mostly zero":
        values[values.abs() < 2.8] = 0
    elif kind == "all equal":
        values.fill_(-2)
    elif kind == "a few large in one place":
        values[1::3] *= 1e3
    expected = torch.sort(values.abs(), stable=True, descending=True).indices[:count].sort().values
    assert torch.equal(largest(values, count), expected)


@pytest.mark.parametrize("method", [fc.topk, fc.randomk])
@pytest.mark.parametrize(("ratio", "count"), [(0.01, 1), (0.034, 3), (0.5, 50), (1, 100), (1e-9, 1)])
def test_exactly_the_stated_share_is_sent(method: type, ratio: float, count: int) -> None:
    info = info_of((100,))
    assert int((sent(method(ratio), torch.ones(100), info) != 0).sum()) == count


def test_randomk_picks_the_same_on_all_ranks_and_others_the_next_time() -> None:
    info, compressor = info_of((100,)), fc.randomk(0.2)
    picked = [sent(compressor, torch.ones(100), info, fc.Key(*key)) for key in [(1, 0), (1, 1), (2, 0)]]
    assert torch.equal(picked[0], picked[1])
    assert not torch.equal(picked[0], picked[2])


# powersgd


def test_powersgd_sends_a_matrix_of_low_rank_whole() -> None:
    generator = torch.Generator().manual_seed(1)
    info = info_of((20, 30), (9,))
    low = torch.randn(20, 2, generator=generator) @ torch.randn(2, 30, generator=generator)
    values = torch.cat([low.flatten(), torch.randn(9, generator=generator)])
    assert torch.allclose(sent(fc.powersgd(2), values, info), values, atol=1e-4)


def test_powersgd_finds_the_best_approximation_when_it_starts_from_the_last_time() -> None:
    info = info_of((20, 30))
    values = values_of(info)
    u, s, v = torch.linalg.svd(values.view(20, 30))
    best = float((values.view(20, 30) - u[:, :2] * s[:2] @ v[:2]).norm())

    def work(rank: int, transport: object) -> tuple[float, float]:
        memories = [fc.Memory()]
        errors = []
        for _ in range(40):
            rest = values.clone()
            fc.powersgd(2).reduce(rest, info, KEY, transport, memories)
            errors.append(float(rest.norm()))
        return errors[0], errors[-1]

    first, last = on_ranks(1, work)[0]
    assert last < first
    assert last < 1.02 * best


# Bad input


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("topk:0", "above 0 and at most 1"),
        ("topk:1.5", "above 0 and at most 1"),
        ("topk:-0.1", "above 0 and at most 1"),
        ("topk:nan", "above 0 and at most 1"),
        ("randomk:2", "above 0 and at most 1"),
        ("topk", "needs a ratio"),
        ("top:0.1", "there is no compressor 'top'; there are none, fp16"),
        ("topk:share=0.1", "no setting of topk; its settings: ratio, feedback"),
        ("topk:0.1,0.2", "no setting of topk"),
        ("fp16:0.1,feedback=on", "feedback"),
        ("none:1", "its settings: none"),
        ("int8:block=0", "whole number from 8"),
        ("int8:rounding=up", 'must be "stochastic" or "nearest"'),
        ("onebit:12", "multiple of 8"),
        ("powersgd:0", "whole number from 1"),
        ("powersgd:1.5", "whole number from 1"),
        ("terngrad:-1", "standard deviations"),
    ],
)
def test_a_bad_specification_is_refused_with_what_is_right(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fc.parse(spec)


def test_a_payload_of_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match="were expected"):
        fc.topk(0.5).decode(torch.zeros(8, dtype=torch.uint8), INFO)


@every_method
def test_every_method_says_where_it_comes_from(spec: str) -> None:
    assert fc.parse(spec).paper
