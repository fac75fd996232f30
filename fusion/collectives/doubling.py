"""Recursive doubling: all-reduce for payloads so short that only the number of messages counts.

In step k a rank exchanges its whole partial result with the rank 2^k away, and
both combine the two, so after log2(p) steps all have the result of all. Where p
is no power of two, the surplus ranks hand their part to a neighbour before and get
the result after. Cycle thread only.

Guarantee: both sides of an exchange compute the same thing, the lower rank's
operand on the left, so every rank arrives at the same bits, and at the same in
every run; and the order in which ranks are combined does not depend on where in
the vector an element is.

Cost for S bytes on p ranks: a rank sends and receives S log2(p) bytes in log2(p)
messages, one after the other, where the ring takes 2 (p-1); with surplus ranks, two
messages more. The ring moves 2 S (p-1)/p bytes, so it wins once bytes count.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication
operations in MPICH", 2005, section 4.5.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from mpi4py import MPI

from fusion.arithmetic import Arithmetic, Scratch
from fusion.channel import Channel


class Doubling:
    """All-reduces over one communicator.

    Args:
        channel: the ranks.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._scratch = Scratch()
        self.rank = channel.rank
        self.size = channel.size

    def all_reduce(self, partial: torch.Tensor, out: torch.Tensor, arithmetic: Arithmetic) -> None:
        """Reduce `partial` of all ranks to `out` on all; they are the same tensor unless widened."""
        self._channel.until(self.begin_all_reduce(partial, out, arithmetic).advance)

    def begin_all_reduce(
        self, partial: torch.Tensor, out: torch.Tensor, arithmetic: Arithmetic, lane: int = 0
    ) -> Exchange:
        """Begin what `all_reduce` does; see `Ring.begin_all_reduce`."""
        landing = self._scratch.take(partial.dtype, len(partial), f"landing {lane}")
        return Exchange(_steps(self._channel, partial, landing, out, arithmetic, lane=lane))


class Exchange:
    """One all-reduce under way; implements `pipeline.Crossing`."""

    def __init__(self, steps: Iterator[list[MPI.Request]]) -> None:
        self._steps = steps
        self._pending: list[MPI.Request] = []
        self.complete = False
        self.first = True

    def advance(self) -> bool:
        """Go as far as messages have come; whether that is to the end."""
        while not self.complete and MPI.Request.Testall(self._pending):
            following = next(self._steps, None)
            self.complete = following is None
            self._pending = following or []
        return self.complete

    def rest(self) -> float:
        """So short that it is always soon."""
        return 0.0


def _steps(
    channel: Channel,
    partial: torch.Tensor,
    landing: torch.Tensor,
    out: torch.Tensor,
    arithmetic: Arithmetic,
    *,
    lane: int,
) -> Iterator[list[MPI.Request]]:
    """The messages of each step; what follows a step is done when they are complete."""
    rank, running = channel.rank, partial
    surplus = surplus_of(channel.size)
    if rank < 2 * surplus:
        if rank % 2:
            yield channel.send(running, rank - 1, lane)
            yield channel.receive(out, rank - 1, lane)
            return
        yield channel.receive(landing, rank + 1, lane)
        arithmetic.combine(running, landing)
        running, landing = landing, running
    for peer in peers_of(rank, channel.size):
        yield [*channel.receive(landing, peer, lane), *channel.send(running, peer, lane)]
        if peer < rank:
            arithmetic.combine(landing, running)
        else:
            arithmetic.combine(running, landing)
            running, landing = landing, running
    arithmetic.finish(running, out)
    if rank < 2 * surplus:
        yield channel.send(out, rank + 1, lane)


def surplus_of(size: int) -> int:
    """How many ranks there are beyond a power of two: each is the odd one of the first pairs."""
    return size - (1 << size.bit_length() - 1)


def peers_of(rank: int, size: int) -> list[int]:
    """With whom a rank exchanges, step by step; nobody, for a surplus one."""
    surplus = surplus_of(size)
    if rank < 2 * surplus and rank % 2:
        return []
    position = rank // 2 if rank < 2 * surplus else rank - surplus
    others = [position ^ 1 << step for step in range((size - surplus).bit_length() - 1)]
    return [2 * other if other < surplus else other + surplus for other in others]
