"""Why an operation cannot run although ranks agreed on it: others have joined, or a rank has left.

Pure functions of what all ranks know, called by the coordinator on its cycle thread.
"""

from __future__ import annotations

from coordinator.errors import FusionError, RankLeftError, ShutdownError
from coordinator.messages import OpKind, ReduceOp, Response
from coordinator.reports import Report, rank_list
from coordinator.wire import Wire

_ALONE = (OpKind.ALLREDUCE, OpKind.BARRIER)
"""Kinds that ranks can run while others have joined. A broadcast would pass the joined ranks by,
and a gathering would lack their rows: callers mean neither."""


def refusal(response: Response, joined: int, wire: Wire) -> FusionError | None:
    """Why ranks cannot run a response while others have joined; None if they can."""
    if not joined:
        return None
    request = response.first
    who = rank_list(joined, wire.ranks)
    if request.kind not in _ALONE or request.op == ReduceOp.ADASUM or request.region is not None:
        what = "adasum" if request.op == ReduceOp.ADASUM else request.kind.name.lower()
        return FusionError(f"'{request.name}': {what} cannot run after {who} called join()")
    return None


def departure(merged: Report, wire: Wire) -> FusionError:
    if wire.rank in merged.leaving:
        return ShutdownError(f"this rank has left the job: {merged.leaving[wire.rank]}")
    who = "; ".join(f"rank {wire.ranks[other]}: {reason}" for other, reason in sorted(merged.leaving.items()))
    return RankLeftError(f"a rank has left the job, so this operation cannot complete ({who})")
