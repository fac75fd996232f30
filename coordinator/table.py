"""The tensor table: the only state that user threads and the cycle thread share.

User threads add entries, the cycle thread drains and removes them. The lock is
private and is never held while anything else is called.

Guarantees: a name is in the table from `add` until `remove`, so two live
operations of one rank never share a name; after `close` nothing is added, and
every entry that was in the table has been handed to the closer exactly once.
"""

from __future__ import annotations

import threading

from coordinator.doorbell import Doorbell
from coordinator.errors import DuplicateNameError
from coordinator.executor import Entry


class TensorTable:
    """Entries in flight on this rank, by name."""

    def __init__(self, doorbell: Doorbell) -> None:
        self._doorbell = doorbell
        self._lock = threading.Lock()
        self._live: dict[str, Entry] = {}
        self._fresh: list[Entry] = []
        self._fresh_bytes = 0
        self._urged = False
        self._closed: BaseException | None = None

    def add(self, entry: Entry) -> None:
        """Accept an entry, on any thread.

        Raises:
            DuplicateNameError: an entry of that name is in flight.
            BaseException: what the table was closed with.
        """
        name = entry.request.name
        with self._lock:
            if self._closed is not None:
                raise self._closed.with_traceback(None)
            if name in self._live:
                raise DuplicateNameError(
                    f"'{name}' is already in flight on this rank: wait for its handle before "
                    "submitting the name again, or give the second tensor a name of its own"
                )
            self._live[name] = entry
            self._fresh.append(entry)
            self._fresh_bytes += entry.request.nbytes
        self._doorbell.ring()

    def urge(self) -> None:
        """A caller is about to wait: entries not drained yet should go now."""
        with self._lock:
            if not self._fresh or self._urged:
                return
            self._urged = True
        self._doorbell.ring()

    def fresh(self) -> tuple[int, float | None, bool]:
        """Bytes waiting to be drained, since when (`time.monotonic`), and whether urged."""
        with self._lock:
            since = self._fresh[0].enqueued_at if self._fresh else None
            return self._fresh_bytes, since, self._urged

    def drain(self) -> list[Entry]:
        """Take the entries added since the last call, in their order. Cycle thread only."""
        with self._lock:
            fresh, self._fresh = self._fresh, []
            self._fresh_bytes, self._urged = 0, False
        return fresh

    def get(self, name: str) -> Entry | None:
        """The live entry of that name. A dict look-up is atomic, so it takes no lock."""
        return self._live.get(name)

    def oldest(self) -> float | None:
        """When the entry that is longest in flight was submitted."""
        with self._lock:
            return next((entry.enqueued_at for entry in self._live.values()), None)

    def ages(self, now: float) -> dict[str, float]:
        """Seconds in flight, by name."""
        with self._lock:
            return {name: now - entry.enqueued_at for name, entry in self._live.items()}

    def remove(self, names: list[str]) -> None:
        """Free the names; called before their handles complete, so that a waiter
        may submit the same name at once."""
        with self._lock:
            for name in names:
                self._live.pop(name, None)

    def close(self, error: BaseException) -> list[Entry]:
        """Refuse further entries with `error` and hand over all live ones."""
        with self._lock:
            if self._closed is None:
                self._closed = error
            live = list(self._live.values())
            self._live.clear()
            self._fresh.clear()
            self._fresh_bytes = 0
        return live

    def __len__(self) -> int:
        return len(self._live)
