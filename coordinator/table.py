"""The tensor table: the only state that user threads and the cycle thread share.

User threads add entries, the cycle thread drains and removes them. There is no
lock: a burst of submissions would be slowed by it, and held up whenever the
thread that has it loses the interpreter. Each step is one atomic operation of a
dict or a deque, and the order of the steps makes every interleaving right.

Guarantees: a name is in the table from `add` until `remove`, so two live
operations of one rank never share a name; after `close` nothing is added, and
every entry that was in the table has been handed to the closer exactly once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import repeat

from coordinator.doorbell import Doorbell
from coordinator.errors import DuplicateNameError
from coordinator.executor import Entry


class TensorTable:
    """Entries in flight on this rank, by name.

    Args:
        doorbell: rung for the first entry since the last `drain`, for the one that
            makes a buffer full, and by `urge`. One ring for every entry would wake
            the cycle thread a thousand times to go back to sleep.
        full: see the attribute.
    """

    def __init__(self, doorbell: Doorbell, full: int) -> None:
        self._doorbell = doorbell
        self.full = full
        """Bytes of a full buffer; may be set on the cycle thread."""
        self._live: dict[str, Entry] = {}
        self._fresh: deque[Entry] = deque()
        self._fresh_bytes = 0  # About: two threads that add at once may count one entry for two.
        self._drained = True
        self._urged = False
        self._closed: BaseException | None = None

    def add(self, entry: Entry) -> None:
        """Accept an entry, on any thread.

        Raises:
            DuplicateNameError: an entry of that name is in flight.
            BaseException: what the table was closed with.
        """
        request = entry.request
        if self._live.setdefault(request.name, entry) is not entry:
            raise DuplicateNameError(
                f"'{request.name}' is already in flight on this rank: wait for its handle before "
                "submitting the name again, or give the second tensor a name of its own"
            )
        # Looked at after the entry is in: either the closer finds it, or it is taken back here.
        if self._closed is not None and self._live.pop(request.name, None) is not None:
            raise self._closed.with_traceback(None)
        self._fresh.append(entry)
        before = self._fresh_bytes
        self._fresh_bytes = after = before + request.nbytes
        # Looked at after the entry is in: a drain that misses it says so before.
        if self._drained or before < self.full <= after:
            self._drained = False
            self._doorbell.ring()

    def urge(self) -> None:
        """A caller is about to wait: entries not drained yet should go now."""
        if self._fresh and not self._urged:
            self._urged = True
            self._doorbell.ring()

    def fresh(self) -> tuple[int, float | None, bool]:
        """Bytes not drained yet, since when (`time.monotonic`), and whether urged. Cycle thread only."""
        since = self._fresh[0].enqueued_at if self._fresh else None
        return self._fresh_bytes, since, self._urged

    def drain(self) -> list[Entry]:
        """Take the entries added since the last call, in their order. Cycle thread only."""
        self._drained, self._urged, self._fresh_bytes = True, False, 0
        take = self._fresh.popleft
        return [take() for _ in range(len(self._fresh))]

    def get(self, name: str) -> Entry | None:
        """The live entry of that name."""
        return self._live.get(name)

    def get_all(self, names: Iterable[str]) -> list[Entry | None]:
        """The live entries of these names."""
        return list(map(self._live.get, names))

    def oldest(self) -> float | None:
        """When the entry that is longest in flight was submitted."""
        return next((entry.enqueued_at for entry in self._entries()), None)

    def ages(self, now: float) -> dict[str, float]:
        """Seconds in flight, by name."""
        return {entry.request.name: now - entry.enqueued_at for entry in self._entries()}

    def remove(self, names: Iterable[str]) -> None:
        """Free the names; called before their handles complete, so that a waiter
        may submit the same name at once."""
        deque(map(self._live.pop, names, repeat(None)), maxlen=0)  # A loop, but not an interpreted one.

    def close(self, error: BaseException) -> list[Entry]:
        """Refuse further entries with `error` and hand over all live ones."""
        if self._closed is None:
            self._closed = error
        live = []
        while self._live:
            live.append(self._live.popitem()[1])
        self._fresh.clear()
        self._fresh_bytes = 0
        return live[::-1]

    def _entries(self) -> list[Entry]:
        """The live entries in the order they were added, while other threads add more."""
        return list(self._live.values())

    def __len__(self) -> int:
        return len(self._live)
