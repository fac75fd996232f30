"""Differentiation through the blocking out-of-place forms.

The gradient of an operation is again operations on all ranks, named after the
forward one, so every rank must run the backward pass too. The rules are
Horovod's. For `allreduce` and `alltoall` they are the derivative of the sum of
all ranks' losses. For `allgather` and `broadcast` the gradients that come in
from the ranks are averaged, as the gradients of a data-parallel loss are; for
`reducescatter` they are those of an all-reduce followed by taking one's rows.

Called on the thread that runs forward and backward; it waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from coordinator.messages import OpKind, ReduceOp
from fusion import runtime
from fusion.torch.process_sets import group_of
from fusion.torch.submission import Collective, Options, submit

Tensors = Sequence[torch.Tensor]
_LINEAR = (ReduceOp.SUM, ReduceOp.AVERAGE)
_SAME = (*_LINEAR, ReduceOp.ADASUM)
"""Gradients are combined as the values were; for Adasum that is no derivative, but what its users want."""


class Call(msgspec.Struct, frozen=True):
    """One forward call, and what its backward needs of it."""

    collective: Collective
    options: Options
    grouped: bool
    """Always named: the name of the backward operations derives from it."""

    def again(
        self, part: str, tensors: Tensors, collective: Collective, **options: Any
    ) -> list[torch.Tensor]:
        """Run another operation as a part of this one's gradient."""
        chosen = Options(name=f"{self.options.name}.{part}", process_set=self.options.process_set, **options)
        handle = submit(collective, tensors, chosen, in_place=False, grouped=True, blocking=True)
        result: list[torch.Tensor] = handle.result()
        return result


class _Differentiable(torch.autograd.Function):
    """A call as a node of the graph."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, siblings: _Siblings, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        results = _run(call, tensors)
        ctx.call, ctx.siblings = call, siblings
        ctx.rows = [tensor.shape[:1] for tensor in tensors]
        if call.collective.kind == OpKind.ALLTOALL:
            ctx.received = results[1].tolist()
            ctx.mark_non_differentiable(results[1])
        elif call.options.op not in _SAME:
            ctx.save_for_backward(*tensors, *results)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *_RULES[ctx.call.collective.kind](ctx, grads)


class _Siblings(msgspec.Struct, frozen=True):
    """The operations that gradients are made of."""

    allreduce: Collective
    allgather: Collective
    alltoall: Collective


def differentiable(call: Call, tensors: Tensors, siblings: dict[str, Collective]) -> list[torch.Tensor]:
    """Run a call so that gradients flow through it."""
    chosen = _Siblings(siblings["allreduce"], siblings["allgather"], siblings["alltoall"])
    results: tuple[torch.Tensor, ...] = _Differentiable.apply(call, chosen, *tensors)
    return list(results)


def _run(call: Call, tensors: Tensors) -> list[torch.Tensor]:
    handle = submit(
        call.collective, tensors, call.options, in_place=False, grouped=call.grouped, blocking=True
    )
    result = handle.result()
    return [result] if isinstance(result, torch.Tensor) else list(result)


def _allreduce(ctx: Any, grads: Tensors) -> Tensors:
    call: Call = ctx.call
    options = call.options
    if options.op in _SAME:
        return call.again(
            "grad",
            grads,
            ctx.siblings.allreduce,
            op=options.op,
            prescale=options.prescale,
            postscale=options.postscale,
        )
    totals = call.again("grad", grads, ctx.siblings.allreduce, op=ReduceOp.SUM)
    inputs, results = _halves(ctx.saved_tensors)
    scale = options.prescale * options.postscale
    rule = _product_shares if options.op == ReduceOp.PRODUCT else _winner_shares
    shares = rule(ctx, [tensor * options.prescale for tensor in inputs], results)
    return [total * share * scale for total, share in zip(totals, shares, strict=True)]


def _winner_shares(ctx: Any, scaled: Tensors, results: Tensors) -> Tensors:
    """The rank whose value is the result gets the gradient; equal ranks share it."""
    postscale = ctx.call.options.postscale
    wins = [(x * postscale == y).to(y.dtype) for x, y in zip(scaled, results, strict=True)]
    counts = ctx.call.again("winners", wins, ctx.siblings.allreduce, op=ReduceOp.SUM)
    return [win / count.clamp(min=1) for win, count in zip(wins, counts, strict=True)]


def _product_shares(ctx: Any, scaled: Tensors, _: Tensors) -> Tensors:
    """The product of the other ranks' values, without dividing by a zero."""
    zeros = [(x == 0).to(x.dtype) for x in scaled]
    nonzero = [torch.where(x == 0, 1, x).to(x.dtype) for x in scaled]
    products = ctx.call.again("products", nonzero, ctx.siblings.allreduce, op=ReduceOp.PRODUCT)
    counts = ctx.call.again("zeros", zeros, ctx.siblings.allreduce, op=ReduceOp.SUM)
    shares = []
    for x, zero, product, count in zip(nonzero, zeros, products, counts, strict=True):
        shares.append(torch.where(count == zero, product / x, torch.zeros_like(x)))
    return shares


def _broadcast(ctx: Any, grads: Tensors) -> Tensors:
    averages = ctx.call.again("grad", grads, ctx.siblings.allreduce, op=ReduceOp.AVERAGE)
    if runtime.current().topology.rank == ctx.call.options.root_rank:
        return averages
    return [torch.zeros_like(average) for average in averages]


def _allgather(ctx: Any, grads: Tensors) -> Tensors:
    call: Call = ctx.call
    mine = [rows[0] for rows in ctx.rows]
    rank = group_of(call.options.process_set).topology.rank
    averages = call.again("grad", grads, ctx.siblings.allreduce, op=ReduceOp.AVERAGE)
    (all_rows,) = call.again("rows", [torch.tensor([mine])], ctx.siblings.allgather)
    starts = all_rows[:rank].sum(0).tolist()
    return [
        average.narrow(0, start, length)
        for average, start, length in zip(averages, starts, mine, strict=True)
    ]


def _alltoall(ctx: Any, grads: Tensors) -> Tensors:
    call: Call = ctx.call
    options = Options(
        name=f"{call.options.name}.grad", splits=ctx.received, process_set=call.options.process_set
    )
    handle = submit(ctx.siblings.alltoall, [grads[0]], options, in_place=False, grouped=False, blocking=True)
    returned: torch.Tensor = handle.result()[0]
    unsent = ctx.rows[0][0] - len(returned)
    if unsent:
        returned = torch.cat([returned, returned.new_zeros(unsent, *returned.shape[1:])])
    return [returned]


def _reducescatter(ctx: Any, grads: Tensors) -> Tensors:
    options = ctx.call.options
    if options.op not in _LINEAR:
        raise NotImplementedError(
            f"reducescatter with op {options.op.name} has no gradient: use Sum or Average"
        )
    factor = options.prescale * options.postscale
    if options.op == ReduceOp.SUM:
        factor *= group_of(options.process_set).topology.size
    return ctx.call.again("grad", [grad * factor for grad in grads], ctx.siblings.allgather)


def _halves(tensors: Tensors) -> tuple[Tensors, Tensors]:
    middle = len(tensors) // 2
    return tensors[:middle], tensors[middle:]


_RULES: dict[OpKind, Callable[[Any, Tensors], Tensors]] = {
    OpKind.ALLREDUCE: _allreduce,
    OpKind.BROADCAST: _broadcast,
    OpKind.ALLGATHER: _allgather,
    OpKind.ALLTOALL: _alltoall,
    OpKind.REDUCESCATTER: _reducescatter,
}
