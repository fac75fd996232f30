"""The pairs of element types for which the copying kernels are compiled."""

from __future__ import annotations

from coordinator.messages import ITEM_SIZE, OpKind, ReduceOp, Request
from fusion.cuda.rules import Rules, rules_of


def combinations() -> list[Rules]:
    """One set of rules for each way the kernels can be compiled."""
    found: dict[tuple[str, ...], Rules] = {}
    for dtype in ITEM_SIZE:
        for op in (ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT):
            for exact in (True, False):
                request = Request("t", OpKind.ALLREDUCE, (dtype,), ((1,),), op=op, device="cuda")
                try:
                    rules = rules_of(request, dtype, 3, exact=exact)
                except ValueError:
                    continue
                found.setdefault(rules.defines, rules)
    return list(found.values())
