"""The numeric rules, without any ranks: the inputs of all ranks are at hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coordinator.messages import ITEM_SIZE, ReduceOp
from fusion.arithmetic import Arithmetic, Scratch
from fusion.dtypes import name_of, to_torch

REDUCTIONS = (ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)


def reduce(
    op: ReduceOp, inputs: list[torch.Tensor], prescale: float = 1.0, postscale: float = 1.0
) -> torch.Tensor:
    arithmetic = rules(op, inputs[0].dtype, len(inputs), prescale, postscale)
    out = torch.empty_like(inputs[0])
    arithmetic.reduce(inputs, out)
    return out


def rules(
    op: ReduceOp, dtype: torch.dtype, size: int, prescale: float = 1.0, postscale: float = 1.0
) -> Arithmetic:
    return Arithmetic(op, name_of(dtype), size, prescale=prescale, postscale=postscale, scratch=Scratch())


def of(dtype: str, *values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=to_torch(dtype))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_floats_are_summed_in_rank_order(dtype: str) -> None:
    big = 2.0 ** (24 if dtype == "float32" else 53)
    assert reduce(ReduceOp.SUM, [of(dtype, big), of(dtype, 1.0), of(dtype, 1.0)]).item() == big
    assert reduce(ReduceOp.SUM, [of(dtype, 1.0), of(dtype, 1.0), of(dtype, big)]).item() == big + 2.0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bit_floats_are_rounded_once(dtype: str) -> None:
    # Each one is lost when it is added to 4096 in 16 bits, and kept in float32.
    inputs = [of(dtype, 4096.0), *[of(dtype, 1.0)] * 64]
    assert reduce(ReduceOp.SUM, inputs).item() == of(dtype, 4160.0).item()


def test_a_half_precision_average_is_finite_where_the_sum_is_not() -> None:
    inputs = [of("float16", 40_000.0)] * 5
    assert reduce(ReduceOp.AVERAGE, inputs).item() == 40_000.0
    assert reduce(ReduceOp.SUM, inputs).item() == float("inf")


def test_a_prescaled_half_precision_sum_is_scaled_in_float32() -> None:
    inputs = [of("float16", 1.0)] * 4
    assert reduce(ReduceOp.SUM, inputs, prescale=1e-6, postscale=1e6).item() == 4.0


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
def test_an_integer_average_is_truncated_toward_zero(dtype: str) -> None:
    assert reduce(ReduceOp.AVERAGE, [of(dtype, -3, 3), of(dtype, -4, 4)]).tolist() == [-3, 3]


def test_the_average_of_equal_floats_is_that_float() -> None:
    values = [float(value) for value in range(1, 400)]
    for size in (2, 3, 5, 6, 7):
        assert reduce(ReduceOp.AVERAGE, [of("float32", *values)] * size).tolist() == values


def test_an_integer_average_does_not_overflow_its_dtype() -> None:
    assert reduce(ReduceOp.AVERAGE, [of("int8", 127, -128)] * 7).tolist() == [127, -128]
    assert reduce(ReduceOp.AVERAGE, [of("uint8", 255)] * 300).tolist() == [255]


def test_an_integer_sum_wraps() -> None:
    assert reduce(ReduceOp.SUM, [of("int8", 127), of("int8", 1)]).tolist() == [-128]
    assert reduce(ReduceOp.SUM, [of("uint8", 255), of("uint8", 2)]).tolist() == [1]


def test_integers_are_scaled_in_float64_and_truncated_toward_zero_before_and_after() -> None:
    inputs = [of("int32", 3, -3), of("int32", 5, -5)]
    assert reduce(ReduceOp.SUM, inputs, prescale=0.5).tolist() == [1 + 2, -1 - 2]
    assert reduce(ReduceOp.SUM, inputs, postscale=0.4).tolist() == [3, -3]
    assert reduce(ReduceOp.AVERAGE, inputs, prescale=2.0, postscale=0.4).tolist() == [3, -3]


def test_large_integers_are_exact_when_they_are_not_scaled() -> None:
    assert reduce(ReduceOp.SUM, [of("int64", 2**62), of("int64", 1)]).tolist() == [2**62 + 1]


def test_bools_are_any_or_all_of_a_whole_world() -> None:
    world = [of("bool", True, rank == 0, False) for rank in range(256)]
    for op in (ReduceOp.SUM, ReduceOp.MAX):
        assert reduce(op, world).tolist() == [True, True, False]
        assert reduce(op, world).view(torch.uint8).tolist() == [1, 1, 0]
    for op in (ReduceOp.MIN, ReduceOp.PRODUCT):
        assert reduce(op, world).tolist() == [True, False, False]


@pytest.mark.parametrize("op", [ReduceOp.AVERAGE, ReduceOp.ADASUM])
def test_an_op_without_a_meaning_for_bools_says_which_have_one(op: ReduceOp) -> None:
    with pytest.raises(ValueError, match=r"bool.*use one of sum, max, min, product"):
        rules(op, torch.bool, 2)


def test_bools_cannot_be_scaled() -> None:
    with pytest.raises(ValueError, match="cannot be scaled"):
        rules(ReduceOp.SUM, torch.bool, 2, postscale=0.5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
def test_a_nan_on_any_rank_is_the_min_and_the_max(dtype: str, op: ReduceOp) -> None:
    for rank in range(3):
        inputs = [of(dtype, float("nan") if rank == at else 1.0) for at in range(3)]
        assert reduce(op, inputs).isnan().all()


@pytest.mark.parametrize("dtype", ITEM_SIZE)
@pytest.mark.parametrize("op", REDUCTIONS)
def test_one_rank_alone_gets_what_it_put_in(op: ReduceOp, dtype: str) -> None:
    if dtype == "bool" and op == ReduceOp.AVERAGE:
        pytest.skip("bools have no average")
    alone = of(dtype, 0, 1, 1)
    assert torch.equal(reduce(op, [alone]), alone)


@pytest.mark.parametrize("dtype", ITEM_SIZE)
@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_result_may_replace_any_of_the_inputs(op: ReduceOp, dtype: str, size: int) -> None:
    if dtype == "bool" and op == ReduceOp.AVERAGE:
        pytest.skip("bools have no average")
    scales = {} if dtype == "bool" else {"prescale": 2.0, "postscale": 0.5}
    inputs = [of(dtype, *range(rank, rank + 9)) for rank in range(size)]
    expected = reduce(op, inputs, **scales)
    for place in range(size):
        copies = [tensor.clone() for tensor in inputs]
        rules(op, to_torch(dtype), size, **scales).reduce(copies, copies[place])
        assert torch.equal(copies[place], expected)


@given(
    dtype=st.sampled_from([name for name in ITEM_SIZE if name != "bool"]),
    op=st.sampled_from(REDUCTIONS),
    size=st.integers(1, 6),
    cut=st.integers(1, 5),
    scales=st.tuples(st.sampled_from([1.0, 0.5, 2.0]), st.sampled_from([1.0, 0.25])),
)
def test_partial_results_of_nodes_combine_to_the_whole(
    dtype: str, op: ReduceOp, size: int, cut: int, scales: tuple[float, float]
) -> None:
    """Accumulate on two nodes, combine, finish: the same as all at once, for exact values."""
    inputs = [of(dtype, *((rank + at) % 4 for at in range(8))) for rank in range(size)]
    whole = reduce(op, inputs, *scales)
    arithmetic = rules(op, to_torch(dtype), size, *scales)
    partials = []
    for node in (inputs[:cut], inputs[cut:]):
        if node:
            partials.append(torch.empty(8, dtype=arithmetic.accumulator))
            arithmetic.accumulate(node, partials[-1])
    if len(partials) == 2:
        arithmetic.combine(partials[0], partials[1])
    out = torch.empty_like(whole)
    arithmetic.finish(partials[-1], out)
    assert torch.equal(out, whole)


def test_scratch_memory_is_reused() -> None:
    scratch = Scratch()
    large = scratch.take(torch.float32, 100, "a")
    assert scratch.take(torch.float32, 50, "a").data_ptr() == large.data_ptr()
    assert scratch.take(torch.float32, 100, "b").data_ptr() != large.data_ptr()
