"""What is done to values that are reduced on devices."""

from __future__ import annotations

import pytest

from coordinator.messages import OpKind, ReduceOp, Request
from fusion.cuda.rules import Order, Rules, rules_of


def rules(dtype: str, op: ReduceOp, *, exact: bool = True, **options: float) -> Rules:
    request = Request("t", OpKind.ALLREDUCE, (dtype,), ((1,),), op=op, device="cuda", **options)
    return rules_of(request, dtype, 4, exact=exact)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_floats_are_summed_in_float32_and_divided_after(dtype: str) -> None:
    found = rules(dtype, ReduceOp.AVERAGE)
    assert (found.buffer_dtype, found.reduction, found.divisor) == ("float32", ReduceOp.SUM, 4)


def test_native_sums_of_16_bit_floats_are_divided_before() -> None:
    found = rules("float16", ReduceOp.AVERAGE, exact=False, prescale=2.0)
    assert (found.buffer_dtype, found.prescale, found.divisor) == ("float16", 0.5, 1)


def test_averages_of_integers_are_summed_in_64_bits() -> None:
    assert rules("int8", ReduceOp.AVERAGE).buffer_dtype == "int64"
    assert rules("int8", ReduceOp.SUM).buffer_dtype == "int8"


def test_16_bit_integers_which_nccl_lacks_are_reduced_in_32() -> None:
    assert {rules("int16", op).buffer_dtype for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN)} == {
        "int32"
    }


@pytest.mark.parametrize(
    ("dtype", "buffer"), [("bfloat16", "int32"), ("float32", "int32"), ("float64", "int64")]
)
def test_min_and_max_of_floats_are_those_of_ordered_integers(dtype: str, buffer: str) -> None:
    low, high = rules(dtype, ReduceOp.MIN), rules(dtype, ReduceOp.MAX)
    assert low.buffer_dtype == high.buffer_dtype == buffer
    assert (low.order, high.order) == (Order.NAN_FIRST, Order.NAN_LAST)


def test_any_and_all_of_bools_are_max_and_min() -> None:
    assert rules("bool", ReduceOp.SUM).reduction == rules("bool", ReduceOp.MAX).reduction == ReduceOp.MAX
    assert rules("bool", ReduceOp.PRODUCT).reduction == rules("bool", ReduceOp.MIN).reduction == ReduceOp.MIN


def test_a_sum_that_nccl_can_do_as_it_is_needs_no_copy() -> None:
    found = rules("float32", ReduceOp.SUM)
    assert found.plain and not found.finishes


def test_what_has_no_meaning_is_refused_as_on_cpus() -> None:
    with pytest.raises(ValueError, match="bool"):
        rules("bool", ReduceOp.AVERAGE)
    with pytest.raises(ValueError, match="Adasum"):
        rules("float32", ReduceOp.ADASUM)
