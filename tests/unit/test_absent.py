"""What a joined rank puts in changes nothing, whatever the op, dtype and scale."""

from __future__ import annotations

import pytest
import torch

from coordinator.handle import Bell, Handle
from coordinator.messages import ANY, ITEM_SIZE, OpKind, ReduceOp, Request
from fusion.absent import absent_entry, neutral
from fusion.arithmetic import Arithmetic, Scratch
from fusion.dtypes import to_torch

OPS = (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)


def absent(request: Request, size: int = 3):
    return absent_entry(request, Handle(request.name, Bell()), size)


@pytest.mark.parametrize("dtype", [name for name in ITEM_SIZE if name != "bool"])
@pytest.mark.parametrize("op", OPS[:3])
@pytest.mark.parametrize("prescale", [1.0, 0.5, 2.0, 3.0, -1.0, -2.0, 0.0])
def test_the_result_is_that_of_the_others(dtype: str, op: ReduceOp, prescale: float) -> None:
    if dtype == "uint8" and prescale < 0.0:
        pytest.skip("there is no negative uint8")
    request = Request("t", OpKind.ALLREDUCE, (dtype,), ((4,),), op=op, prescale=prescale)
    other = torch.tensor([0, 1, 30, 42]).to(to_torch(dtype))
    arithmetic = Arithmetic(op, dtype, 2, prescale=prescale, postscale=1.0, scratch=Scratch())
    alone, both = torch.empty_like(other), torch.empty_like(other)
    arithmetic.reduce([other], alone)
    arithmetic.reduce([other, absent(request).inputs[0]], both)
    assert torch.equal(alone, both)


@pytest.mark.parametrize("dtype", ITEM_SIZE)
@pytest.mark.parametrize("op", OPS)
def test_unscaled_values_keep_their_place_at_the_ends_of_the_range(op: ReduceOp, dtype: str) -> None:
    request = Request("t", OpKind.ALLREDUCE, (dtype,), ((2,),), op=op)
    torch_dtype = to_torch(dtype)
    if dtype == "bool":
        ends = [False, True]
    else:
        limits = torch.finfo(torch_dtype) if torch_dtype.is_floating_point else torch.iinfo(torch_dtype)
        ends = [limits.min, limits.max]
    other = torch.tensor(ends, dtype=torch_dtype)
    out = torch.empty_like(other)
    arithmetic = Arithmetic(op, dtype, 2, prescale=1.0, postscale=1.0, scratch=Scratch())
    arithmetic.reduce([other, absent(request).inputs[0]], out)
    assert torch.equal(out, other)


def test_a_scaled_product_of_floats_is_left_alone() -> None:
    request = Request("t", OpKind.ALLREDUCE, ("float32",), ((1,),), op=ReduceOp.PRODUCT, prescale=4.0)
    assert neutral(request, "float32") * 4.0 == 1.0


def test_rows_that_are_free_are_none() -> None:
    entry = absent(Request("t", OpKind.ALLGATHER, ("int8",), ((ANY, 3),)))
    assert entry.inputs[0].shape == (0, 3) and entry.outputs == [None]


def test_an_alltoall_gets_no_rows_from_it() -> None:
    entry = absent(Request("t", OpKind.ALLTOALL, ("int8",), ((ANY,),)), size=3)
    assert entry.inputs[0].shape == (0,) and entry.extra == [0, 0, 0]
