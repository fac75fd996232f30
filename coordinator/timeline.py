"""A trace of one rank that Perfetto and chrome://tracing open.

One row for the cycles and one for each tensor name; the process is the rank.
Times are the clock's seconds turned into microseconds, so traces of ranks on one
node line up when they are opened together.

The cycle thread writes, any thread may close. Guarantees: the file is valid JSON
at every instant (see `json_array`); it never exceeds the size it was given, and
says where it stopped; a disk that fails ends the trace with a warning and never
the job.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from coordinator.json_array import PAGE, JsonArray

logger = logging.getLogger("fusion")

CYCLE_ROW = 0
LONGEST_LABEL = 1024
"""Characters of an escaped name on its row; a longer one is cut, since a record must fit a page."""


def timeline_path(path: str, rank: int) -> str | None:
    """The file this rank writes when every rank was given `path`.

    A path that holds `{rank}` gives each rank a file of its own; any other is
    rank 0's alone, so that ranks never write into one file.
    """
    if "{rank}" in path:
        return path.replace("{rank}", str(rank))
    return path if rank == 0 else None


class Timeline:
    """The trace while it is being written.

    Args:
        path: the file, which is replaced.
        rank: of this process.
        max_mb: the most MiB the file may take.
        clock: seconds that never go back, the clock of the spans.
    """

    def __init__(
        self,
        path: str | Path,
        rank: int,
        max_mb: float = 64.0,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = str(path)
        self._rank = rank
        self._max_mb = max_mb
        self._clock = clock
        self._lock = threading.Lock()
        self._rows: dict[str, int] = {}
        self._idle_cycles = 0
        self._array = JsonArray(
            self._path, self._meta("process_name", CYCLE_ROW, name=f"rank {rank}"), int(max_mb * 2**20) - PAGE
        )
        self._write(
            [
                self._meta("process_sort_index", CYCLE_ROW, sort_index=rank),
                self._meta("thread_name", CYCLE_ROW, name="cycles"),
            ]
        )

    @property
    def closed(self) -> bool:
        """Whether nothing more is written: it was closed, is full, or its disk failed."""
        return self._array.closed

    def span(self, phase: str, names: Sequence[str], start: float, stop: float, nbytes: int) -> None:
        """A phase that the tensors `names`, of `nbytes` together, went through as one."""
        args = f'{{"bytes":{nbytes},"tensors":{len(names)}}}'
        self._write(
            [
                record
                for name in dict.fromkeys(names)
                for record in self._row(name, lambda row: self._event(phase, row, start, stop, args))
            ]
        )

    def cycle(self, start: float, stop: float, ready: int) -> None:
        """A negotiation cycle; those that found nothing ready are only counted."""
        if not ready:
            self._idle_cycles += 1
            return
        args = f'{{"ready":{ready},"idle_cycles_before":{self._idle_cycles}}}'
        self._idle_cycles = 0
        self._write([self._event("cycle", CYCLE_ROW, start, stop, args)])

    def close(self) -> None:
        """End the trace. Later events are dropped."""
        with self._lock:
            try:
                self._array.close()
            except OSError as error:
                self._abandon(error)

    def _row(self, name: str, event: Callable[[int], str]) -> list[str]:
        row = self._rows.get(name)
        if row is not None:
            return [event(row)]
        row = self._rows[name] = len(self._rows) + 1
        return [self._meta("thread_name", row, name=_cut(name)), event(row)]

    def _event(self, name: str, row: int, start: float, stop: float, args: str) -> str:
        at, took = start * 1e6, max(0.0, stop - start) * 1e6
        return (
            f'{{"ph":"X","pid":{self._rank},"tid":{row},"name":{json.dumps(name)},'
            f'"ts":{at:.1f},"dur":{took:.1f},"args":{args}}}'
        )

    def _meta(self, kind: str, row: int, **args: str | int) -> str:
        return json.dumps({"ph": "M", "pid": self._rank, "tid": row, "name": kind, "args": args})

    def _write(self, records: list[str]) -> None:
        with self._lock:
            if self._array.closed:
                return
            try:
                if not self._array.append(records):
                    self._array.close(self._full())
                    logger.warning(
                        "the timeline '%s' is full at %g MB and has stopped; raise timeline_max_mb",
                        self._path,
                        self._max_mb,
                    )
            except OSError as error:
                self._abandon(error)

    def _full(self) -> str:
        return json.dumps(
            {
                "ph": "i",
                "s": "g",
                "pid": self._rank,
                "tid": CYCLE_ROW,
                "name": f"timeline full: timeline_max_mb is {self._max_mb:g}",
                "ts": round(self._clock() * 1e6, 1),
            }
        )

    def _abandon(self, error: OSError) -> None:
        self._array.abandon()
        logger.warning("the timeline '%s' has stopped: %s", self._path, error)


def _cut(name: str) -> str:
    if len(json.dumps(name)) <= LONGEST_LABEL:
        return name
    return name[: LONGEST_LABEL // 16] + "..."
