"""How values of different GPUs become one: what NCCL is told, and what packing and unpacking do around it.

A pure function of the request, with the rules of `fusion.arithmetic`: the same
inputs give the same result there and here, up to the order in which floats are
added.

| dtype | in the buffer | because |
|---|---|---|
| float16, bfloat16 | float32 | summed there and rounded once |
| int16 | int32 | NCCL has no 16-bit integers; a sum is cut to 16 bits at the end, as it would be on the way |
| integers, averaged | int64 | an average is truncated once, at the end |
| bool | uint8 | any is a maximum, all is a minimum |
| floats, min and max | integers in the order of the floats | NCCL drops NaN, torch does not |
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from coordinator.messages import ITEM_SIZE, ReduceOp, Request
from fusion.arithmetic import Arithmetic, Scratch
from fusion.dtypes import to_torch

CODES = {
    name: code
    for code, name in enumerate(
        ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
    )
}
"""The numbers of the element types in `copying.cu`."""


class Order(IntEnum):
    """Whether the buffer has floats as ordered integers, and where NaN is among them."""

    NONE = 0
    NAN_FIRST = 1
    NAN_LAST = 2


class Rules(msgspec.Struct, frozen=True):
    """What is done to the values of one response."""

    dtype: str
    buffer_dtype: str
    reduction: ReduceOp
    """SUM, PRODUCT, MIN or MAX, of the values in the buffer."""
    order: Order = Order.NONE
    prescale: float = 1.0
    divisor: int = 1
    postscale: float = 1.0

    @property
    def plain(self) -> bool:
        """Whether the buffer's values have the tensors' own form."""
        return self.dtype == self.buffer_dtype and self.order == Order.NONE

    @property
    def finishes(self) -> bool:
        """Whether there is something left to do once values are reduced."""
        return not self.plain or self.divisor != 1 or self.postscale != 1.0

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the buffer."""
        return ITEM_SIZE[self.buffer_dtype]

    @property
    def defines(self) -> tuple[str, ...]:
        """How the kernels are compiled."""
        return (
            f"-DDATA={CODES[self.dtype]}",
            f"-DACC={CODES[self.buffer_dtype]}",
            f"-DORDER={int(self.order)}",
        )


def rules_of(request: Request, dtype: str, size: int, *, exact: bool) -> Rules:
    """The rules of a reduction over `size` ranks.

    Args:
        request: its op and scale factors.
        dtype: of the tensors.
        size: how many ranks there are.
        exact: sum 16-bit floats in float32; if not, in their own type, which halves what
            travels, rounds at every step, and divides an average before the sum.

    Raises:
        ValueError: the op has no meaning for the dtype; alike on all ranks.
    """
    op = request.op
    if op == ReduceOp.ADASUM:
        raise ValueError("Adasum is not made of sums")
    # For its checks.
    Arithmetic(op, dtype, size, prescale=request.prescale, postscale=request.postscale, scratch=Scratch())
    reduction = ReduceOp.SUM if op == ReduceOp.AVERAGE else op
    if dtype == "bool":
        any_of = op in (ReduceOp.SUM, ReduceOp.MAX)
        return Rules(dtype, "uint8", ReduceOp.MAX if any_of else ReduceOp.MIN)
    floating = to_torch(dtype).is_floating_point
    prescale, divisor = request.prescale, size if op == ReduceOp.AVERAGE else 1
    order = Order.NONE
    if floating and op in (ReduceOp.MIN, ReduceOp.MAX):
        order = Order.NAN_FIRST if op == ReduceOp.MIN else Order.NAN_LAST
        buffer_dtype = "int64" if dtype == "float64" else "int32"
    elif dtype in ("float16", "bfloat16"):
        buffer_dtype = "float32" if exact else dtype
        if not exact:
            prescale, divisor = prescale / divisor, 1
    elif not floating and divisor != 1:
        buffer_dtype = "int64"
    else:
        buffer_dtype = "int32" if dtype == "int16" else dtype
    return Rules(dtype, buffer_dtype, reduction, order, prescale, divisor, request.postscale)
