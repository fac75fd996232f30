"""The segmented ring: reduce-scatter and all-gather between ranks, over point-to-point messages.

A vector is divided into one block for each of p ranks. In the first p - 1 steps
a rank receives a partial block from the left, adds its own part, and passes it
on; block r is then complete on rank r. In the next p - 1 steps complete blocks
go once around. Blocks travel in segments: receives are posted ahead, and a
segment is passed on as soon as it is ready, so both directions of the link are
busy and steps overlap. A rank has a bounded number of sends under way: MPI would
have to keep what the right neighbour does not ask for yet. Each block is combined
in a fixed order, on one rank, so the result has the same bits everywhere.

Cost for S bytes: a rank sends and receives 2 S (p-1)/p bytes in
2 (p-1) max(1, S / (p segment)) messages. Where partial results are wider than
the data (16-bit floats), the first half of the bytes doubles.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", 2009.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial as bind
from itertools import chain, cycle

import torch
from mpi4py import MPI

from fusion.arithmetic import Arithmetic, Scratch
from fusion.channel import Channel
from fusion.collectives.node import ranges

AHEAD = 16
"""Receives posted, and sends under way. Two of each would hide the latency; with the rest the link is busy
while this thread sleeps, and it wakes for several at once, which takes half the processor time."""
BATCH = 6
"""It sleeps for so many segments at most, so that as many again may be late."""
NEAR = 0.25
"""Of the time of a segment: the sleep while little else is on its way, lest others wait for this rank."""
MEASURED = 8
"""Segments after which their pace is known."""

Block = tuple[int, int]


class Ring:
    """Rings over one communicator.

    Args:
        channel: the ranks, in ring order.
        segment_bytes: most bytes of a message.
    """

    def __init__(self, channel: Channel, segment_bytes: int) -> None:
        self._channel = channel
        self._segment_bytes = segment_bytes
        self._scratch = Scratch()
        self._pace = Pace()
        self.rank = channel.rank
        self.size = channel.size

    def all_reduce(self, partial: torch.Tensor, out: torch.Tensor, arithmetic: Arithmetic) -> None:
        """Reduce `partial` of all ranks to `out` on all; they are the same tensor unless widened."""
        self.begin_all_reduce(partial, out, arithmetic).finish()

    def begin_all_reduce(
        self, partial: torch.Tensor, out: torch.Tensor, arithmetic: Arithmetic, lane: int = 0
    ) -> Run:
        """Begin what `all_reduce` does; tensors and scratch memory must stay until it is complete.

        Args:
            lane: operations under way at the same time are told apart by it, on all ranks alike.
        """
        blocks = even_blocks(len(out), self.size)
        run = self._run(partial, blocks, lane)
        if self.size == 1:
            arithmetic.finish(partial, out)
            return run
        run.reduce(partial, arithmetic, lambda lo, hi: arithmetic.finish(partial[lo:hi], out[lo:hi]), out)
        run.gather(out)
        return run

    def reduce_scatter(self, partial: torch.Tensor, blocks: Sequence[Block], arithmetic: Arithmetic) -> None:
        """Leave block r of `partial`, reduced but not finished, on rank r; the rest is consumed."""
        if self.size > 1:
            run = self._run(partial, blocks)
            run.reduce(partial, arithmetic, _leave, None)
            run.finish()

    def all_gather(self, out: torch.Tensor, blocks: Sequence[Block]) -> None:
        """Fill `out`, of which each rank has its own block, on all ranks."""
        if self.size > 1:
            run = self._run(out, blocks)
            run.gather(out)
            run.finish()

    def _run(self, widest: torch.Tensor, blocks: Sequence[Block], lane: int = 0) -> Run:
        """Segments have as many elements in all steps, so the widest dtype decides."""
        segment = max(1, self._segment_bytes // widest.element_size())
        longest = max(hi - lo for lo, hi in blocks)
        length = min(segment, max(longest, 1))
        landing = self._scratch.take(widest.dtype, AHEAD * length, f"landing {lane}")
        return Run(self._channel, segment, blocks, landing.split(length), pace=self._pace, lane=lane)


class Pace:
    """How long a segment takes on the link, once some have come, for the length of sleeps."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = 0.0
        self._came = 0
        self.seconds = 0.0
        """For one segment; 0 while unknown."""

    def begin(self) -> None:
        """An operation begins. Its first segment may have to wait for other ranks, and says nothing."""
        self._came = 0

    def came(self) -> None:
        """One more segment has come."""
        if self._came % MEASURED == 0:
            now = self._clock()
            if self._came:
                self.seconds = (now - self._since) / MEASURED
            self._since = now
        self._came += 1


def even_blocks(count: int, size: int) -> list[Block]:
    """One block of `count` elements for each rank, as equal as can be."""
    return [(count * rank // size, count * (rank + 1) // size) for rank in range(size)]


def _leave(lo: int, hi: int) -> None:
    """Complete a segment by leaving it as it is."""


def _pass_on(segment: torch.Tensor, last: bool) -> torch.Tensor | None:
    return None if last else segment


class _Receive:
    """A segment to come: where it lands, and what is done with it."""

    def __init__(self, place: int, target: torch.Tensor, then: Callable[[], torch.Tensor | None]) -> None:
        self.place = place
        """First element of the vector that it is about."""
        self.target = target
        self.then = then
        """Uses the segment and returns what to pass on, if anything."""
        self.requests: list[MPI.Request] = []


class Run:
    """One ring operation: the segments to receive in order, and the sends under way.

    Whoever has planned one asks it to `advance` until it is `complete`. Implements `pipeline.Crossing`.

    Attributes:
        complete: whether all has come, been used and been sent.
        first: whether it may use the link as it likes; else an earlier operation goes before it.
    """

    def __init__(
        self,
        channel: Channel,
        segment: int,
        blocks: Sequence[Block],
        landing: Sequence[torch.Tensor],
        *,
        pace: Pace,
        lane: int,
    ) -> None:
        self._channel = channel
        self._segment = segment
        self._blocks = blocks
        self._landing = landing
        self._pace = pace
        self._lane = lane
        self._rank, self._size = channel.rank, channel.size
        self._receives: list[Iterator[_Receive]] = []
        self._upcoming: Iterator[_Receive] | None = None
        self._next: _Receive | None = None
        """The receive to post as soon as nothing lies where it lands."""
        self._posted: deque[_Receive] = deque()
        self._awaited: set[int] = set()
        """Places of all segments that receives are posted for."""
        self._outgoing: deque[torch.Tensor] = deque()
        """Segments to send, in order."""
        self._sending: deque[tuple[int, list[MPI.Request]]] = deque()
        """Sends under way, in order, with the address of their data."""
        self._unsent: set[int] = set()
        """Addresses of all segments that MPI has not read to the end."""
        self._sent = self._taken = 0
        self.complete = False
        self.first = True

    def reduce(
        self,
        partial: torch.Tensor,
        arithmetic: Arithmetic,
        complete: Callable[[int, int], None],
        out: torch.Tensor | None,
    ) -> None:
        """Plan a reduce-scatter; a complete segment is then passed on from `out`, if that is given."""
        for lo, hi in self._segments(self._rank - 1):
            self._send(partial[lo:hi])
        self._receives.append(self._reducing(partial, arithmetic, complete, out))

    def gather(self, out: torch.Tensor) -> None:
        """Plan an all-gather, which follows a planned reduce-scatter."""
        if not self._receives:
            for lo, hi in self._segments(self._rank):
                self._send(out[lo:hi])
        self._receives.append(self._gathering(out))

    def advance(self) -> bool:
        """Do what can be done without waiting; says whether that was anything but sending."""
        if self._upcoming is None:
            self._pace.begin()
            self._upcoming = chain.from_iterable(self._receives)
            self._next = next(self._upcoming, None)
        self._sweep()
        self._push()
        self._post()
        taken = self._taken
        while self._posted and MPI.Request.Testall(self._posted[0].requests):
            self._take(self._posted.popleft())
        self.complete = not (self._posted or self._next or self._unsent)
        return self.complete or self._taken > taken

    def finish(self) -> None:
        """Wait for its end. The right neighbour asks for segments in the order in which they are
        sent, and whether it asks depends on earlier ones only, so this comes to an end."""
        self.advance()
        while not self.complete:
            self._channel.until(self.advance, expected=self.rest())

    def rest(self) -> float:
        """Seconds in which several segments will have come, while the link is busy; 0 if unknown.

        Ranks send as fast as they receive, so what was sent beyond what has come is on its way.
        """
        several = min(BATCH, len(self._posted), (self._sent - self._taken) // 2)
        return self._pace.seconds * (several if several > 1 else NEAR)

    def _reducing(
        self,
        partial: torch.Tensor,
        arithmetic: Arithmetic,
        complete: Callable[[int, int], None],
        out: torch.Tensor | None,
    ) -> Iterator[_Receive]:
        def use(landed: torch.Tensor, lo: int, hi: int, last: bool) -> torch.Tensor | None:
            arithmetic.combine(landed, partial[lo:hi])
            if not last:
                return partial[lo:hi]
            complete(lo, hi)
            return None if out is None else out[lo:hi]

        free = cycle(self._landing)
        for step in range(self._size - 1):
            last = step == self._size - 2
            for lo, hi in self._segments(self._rank - step - 2):
                target = next(free)[: hi - lo]
                yield _Receive(lo, target, bind(use, target, lo, hi, last))

    def _gathering(self, out: torch.Tensor) -> Iterator[_Receive]:
        for step in range(self._size - 1):
            last = step == self._size - 2
            for lo, hi in self._segments(self._rank - step - 1):
                target = out[lo:hi]
                yield _Receive(lo, target, bind(_pass_on, target, last))

    def _segments(self, block: int) -> list[Block]:
        lo, hi = self._blocks[block % self._size]
        return ranges(lo, hi, self._segment)

    def _post(self) -> None:
        """Post receives as far ahead as may be."""
        while self._next is not None and len(self._posted) < AHEAD and not self._busy(self._next):
            self._next.requests = self._channel.receive(
                self._next.target, (self._rank - 1) % self._size, self._lane
            )
            self._posted.append(self._next)
            self._awaited.add(self._next.place)
            assert self._upcoming is not None
            self._next = next(self._upcoming, None)

    def _busy(self, receive: _Receive) -> bool:
        """Whether what lies where a segment would land is still needed: a complete segment replaces the
        partial one, which may be worked on, and one sent in the first half, which may not be on its way."""
        place, address = receive.place, receive.target.data_ptr()
        return address in self._unsent or place in self._awaited

    def _take(self, receive: _Receive) -> None:
        """Use a segment that has come."""
        self._pace.came()
        self._taken += 1
        self._awaited.discard(receive.place)
        passed = receive.then()
        if passed is not None:
            self._send(passed)
        self._push()
        self._post()

    def _send(self, segment: torch.Tensor) -> None:
        self._outgoing.append(segment)
        self._unsent.add(segment.data_ptr())

    def _push(self) -> None:
        """Begin the next sends as far as earlier ones are complete."""
        if self._outgoing and len(self._sending) >= AHEAD:
            self._sweep()
        while (
            self._outgoing and len(self._sending) < AHEAD and (self.first or self._sent < self._taken + BATCH)
        ):
            segment = self._outgoing.popleft()
            requests = self._channel.send(segment, (self._rank + 1) % self._size, self._lane)
            self._sending.append((segment.data_ptr(), requests))
            self._sent += 1

    def _sweep(self) -> None:
        """Forget sends that are complete."""
        while self._sending and MPI.Request.Testall(self._sending[0][1]):
            self._unsent.discard(self._sending.popleft()[0])
