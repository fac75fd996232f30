"""Which algorithm runs: pure functions of what all ranks know."""

from __future__ import annotations

from enum import Enum, auto

from coordinator.messages import OpKind, ReduceOp, Response

SHORT_BYTES = 32 * 1024
"""Payloads between nodes up to this long go by recursive doubling.

Measured between two hosts on 1 Gbit/s, 2 to 4 ranks: up to here it takes a quarter to all of the ring's
time; with 4 ranks the ring has caught up at twice as much and wins at four times (docs/performance.md). It is
no setting: no setting that may be tuned changes the order of a sum."""


class Algorithm(Enum):
    """An algorithm of this package; the value has no meaning."""

    SHARED = auto()
    IN_PLACE = auto()
    RING = auto()
    HIERARCHICAL = auto()
    BROADCAST = auto()
    ALLGATHER = auto()
    ALLTOALL = auto()
    REDUCESCATTER = auto()
    BARRIER = auto()
    ADASUM = auto()
    COMPRESSED = auto()


_BY_KIND = {
    OpKind.BROADCAST: Algorithm.BROADCAST,
    OpKind.ALLGATHER: Algorithm.ALLGATHER,
    OpKind.ALLTOALL: Algorithm.ALLTOALL,
    OpKind.REDUCESCATTER: Algorithm.REDUCESCATTER,
    OpKind.BARRIER: Algorithm.BARRIER,
}


def choose(response: Response, *, nodes: int, size: int, hierarchy: str) -> Algorithm:
    """The algorithm for a response.

    Args:
        response: what all ranks agreed to run.
        nodes: how many nodes there are.
        size: how many ranks there are.
        hierarchy: "off" sends every rank's data around the ring by itself; "on" and
            "auto" combine the ranks of a node first.
    """
    if response.kind != OpKind.ALLREDUCE:
        return _BY_KIND[response.kind]
    if response.first.codec != "none":
        return Algorithm.COMPRESSED
    if response.first.op == ReduceOp.ADASUM:
        return Algorithm.ADASUM
    if response.first.region is not None:
        return Algorithm.IN_PLACE
    if size == 1:
        return Algorithm.SHARED
    if hierarchy == "off":
        return Algorithm.RING
    return Algorithm.SHARED if nodes == 1 else Algorithm.HIERARCHICAL


def is_short(nbytes: int) -> bool:
    """Whether a payload between nodes goes by recursive doubling; by the ring otherwise.

    Args:
        nbytes: of the partial results, which may be wider than the data.
    """
    return nbytes <= SHORT_BYTES
