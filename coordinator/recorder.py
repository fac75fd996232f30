"""What the cycle thread and the executor report to: it keeps the totals and feeds the timeline.

The cycle thread calls `cycle`, `queued`, `span` and `response`. Any thread may
call `stats`, `start_timeline`, `stop_timeline` and `close`. A snapshot taken
while a response is running may hold a part of it.

Without a timeline a call costs a few additions, however many tensors it is about.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from coordinator.executor import Entry
from coordinator.messages import OpKind, Response
from coordinator.stats import Stats
from coordinator.timeline import Timeline, timeline_path

PHASES = ("queued", "negotiate", "pack", "reduce", "unpack")
_WITHOUT_TENSORS = (OpKind.BARRIER, OpKind.ARENA)


class Recorder:
    """Totals and trace of one rank.

    Args:
        rank: of this process.
        timeline: where to write a trace from the start, see `timeline_path`; None for no trace.
        timeline_max_mb: the most MiB a trace may take.
        clock: seconds that never go back; the callers' times must be of the same clock.
    """

    def __init__(
        self,
        rank: int = 0,
        *,
        timeline: str | None = None,
        timeline_max_mb: float = 64.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank = rank
        self._timeline_max_mb = timeline_max_mb
        self._clock = clock
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._cycles = self._responses = self._tensors = self._bytes = 0
        self._buffers = self._reduced_tensors = self._reduced_bytes = 0
        self._compressed_bytes = self._payload_bytes = 0
        self._cycle_start = 0.0
        self._timeline: Timeline | None = None
        if timeline is not None:
            self.start_timeline(timeline)

    def cycle(self, start: float, stop: float, ready: int) -> None:
        """A negotiation round took `start` to `stop` and found `ready` requests."""
        self._cycles += 1
        self._cycle_start = start
        if ready:
            self._seconds["negotiate"] += stop - start
        timeline = self._timeline
        if timeline is not None:
            timeline.cycle(start, stop, ready)

    def queued(self, response: Response, entries: Sequence[Entry], negotiated: float) -> None:
        """The entries of a response were agreed at `negotiated`, in the last round.

        They were queued until that round began, which includes the wait for ranks
        that were late with them.
        """
        begun = self._cycle_start
        if response.grouped:
            # A group's entry comes once for each of its tensors, and may be spread over several responses.
            entries = [entry for entry in dict.fromkeys(entries) if not entry.executed]
        queued = begun * len(entries) - sum([entry.enqueued_at for entry in entries])
        self._seconds["queued"] += max(queued, 0.0)
        timeline = self._timeline
        if timeline is not None:
            for entry in entries:
                name, nbytes = (entry.request.name,), entry.request.nbytes
                began = max(entry.enqueued_at, begun)
                timeline.span("queued", name, entry.enqueued_at, began, nbytes)
                timeline.span("negotiate", name, began, negotiated, nbytes)

    def span(self, phase: str, names: Sequence[str], start: float, stop: float, nbytes: int) -> None:
        """The tensors `names`, of `nbytes` together, went through `phase` (one of `PHASES`)."""
        self._seconds[phase] += stop - start
        timeline = self._timeline
        if timeline is not None:
            timeline.span(phase, names, start, stop, nbytes)

    def compressed(self, nbytes: int, payload: int) -> None:
        """Tensors of `nbytes` together were moved as `payload` bytes."""
        self._compressed_bytes += nbytes
        self._payload_bytes += payload

    def response(self, response: Response) -> None:
        """A response has been run."""
        self._responses += 1
        if response.kind in _WITHOUT_TENSORS:
            return
        tensors, nbytes = len(response.parts), response.nbytes
        self._tensors += tensors
        self._bytes += nbytes
        if response.kind == OpKind.ALLREDUCE:
            self._buffers += 1
            self._reduced_tensors += tensors
            self._reduced_bytes += nbytes

    def stats(self) -> Stats:
        """The totals so far."""
        return Stats(
            cycles=self._cycles,
            responses=self._responses,
            tensors=self._tensors,
            bytes=self._bytes,
            buffers=self._buffers,
            reduced_tensors=self._reduced_tensors,
            reduced_bytes=self._reduced_bytes,
            compressed_bytes=self._compressed_bytes,
            payload_bytes=self._payload_bytes,
            queued_s=self._seconds["queued"],
            negotiate_s=self._seconds["negotiate"],
            pack_s=self._seconds["pack"],
            reduce_s=self._seconds["reduce"],
            unpack_s=self._seconds["unpack"],
        )

    def start_timeline(self, path: str) -> None:
        """Begin a trace, ending the one before; does nothing on a rank that `path` gives no file.

        Raises:
            OSError: the file cannot be made.
            ValueError: there is something else than a file at `path`.
        """
        self.stop_timeline()
        mine = timeline_path(path, self._rank)
        if mine is not None:
            self._timeline = Timeline(mine, self._rank, self._timeline_max_mb, clock=self._clock)

    def stop_timeline(self) -> None:
        """End the trace, if there is one; the file is complete when this returns."""
        timeline, self._timeline = self._timeline, None
        if timeline is not None:
            timeline.close()

    def close(self) -> None:
        """End the trace. The totals can still be read."""
        self.stop_timeline()
