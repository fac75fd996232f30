"""What becomes of operations in special cases: pure functions, called on the cycle thread."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.errors import FusionError, RankLeftError, ShutdownError
from coordinator.executor import Entry
from coordinator.messages import OpKind, ReduceOp, Response
from coordinator.reports import Report, rank_list

_ALONE = (OpKind.ALLREDUCE, OpKind.BARRIER)
"""Kinds that ranks can run while others have joined. A broadcast would pass the joined ranks by,
and a gathering would lack their rows: callers mean neither."""


def finished_of(entries: list[Entry]) -> list[Entry]:
    """Those of which this was the last part."""
    finished = []
    for entry in entries:
        entry.executed += 1
        if entry.executed == len(entry.request.shapes):
            finished.append(entry)
    return finished


def refusal_of(response: Response, joined: int, ranks: Sequence[int]) -> FusionError | None:
    """Why ranks cannot run a response while others have joined; None if they can.

    Args:
        joined: bit mask of the ranks that have joined.
        ranks: what messages call the ranks.
    """
    if not joined:
        return None
    request = response.first
    who = rank_list(joined, ranks)
    if request.kind not in _ALONE or request.op == ReduceOp.ADASUM or request.region is not None:
        what = "adasum" if request.op == ReduceOp.ADASUM else request.kind.name.lower()
        return FusionError(f"'{request.name}': {what} cannot run after {who} called join()")
    return None


def departure_of(merged: Report, rank: int, ranks: Sequence[int]) -> FusionError:
    """The end of the runtime on `rank` because some ranks leave."""
    if rank in merged.leaving:
        return ShutdownError(f"this rank has left the job: {merged.leaving[rank]}")
    who = "; ".join(f"rank {ranks[other]}: {reason}" for other, reason in sorted(merged.leaving.items()))
    return RankLeftError(f"a rank has left the job, so this operation cannot complete ({who})")
