"""Operations that were launched and are not complete: rings that have begun, what a device works on.

Cycle thread only. Callers of a device may have taken the outputs already
(`Handle.result` makes their later work wait on the device); a handle is done, and its
tensors are let go, when the device is.
"""

from __future__ import annotations

import logging
from collections import deque

from coordinator.errors import StallError
from coordinator.executor import Entry, Work

FULL = 2
"""Operations that callers wait for to the end: a third, begun now, would only be smaller than it need be."""

logger = logging.getLogger("fusion")

SHORTEST_NAP_S = 50e-6
LONGEST_NAP_S = 1e-3
_SHARE = 0.125


class UnderWay:
    """Launched operations, in the order of their launch, in which they complete.

    Args:
        warning_s: age of an operation that is warned about; 0 for never.
        shutdown_s: age of an operation with which the runtime ends; 0 for never.

    Attributes:
        works: what is under way; for others to see whether there is anything, which costs no call.
    """

    def __init__(self, warning_s: float, shutdown_s: float) -> None:
        self._warning_s = warning_s
        self._shutdown_s = shutdown_s
        self.works: deque[tuple[float, tuple[str, ...], list[Entry], Work]] = deque()
        self._warned = False
        self._waited_for = 0

    @property
    def full(self) -> bool:
        """Whether more should wait, to be fused meanwhile."""
        return self._waited_for >= FULL

    def __len__(self) -> int:
        return len(self.works)

    def add(self, now: float, names: tuple[str, ...], entries: list[Entry], work: Work) -> None:
        """Take charge of a launched response; `entries` complete with it."""
        if work.early:
            for entry in entries:
                entry.launched(work)
        else:
            self._waited_for += 1
        self.works.append((now, names, entries, work))

    def poll(self, now: float) -> list[tuple[list[Entry], Work]]:
        """Take what is done, to be completed.

        Raises:
            StallError: the oldest is older than `shutdown_s`.
            Exception: what the device says went wrong.
        """
        works, done = self.works, []
        while works and works[0][3].done():
            _, _, entries, work = works.popleft()
            self._waited_for -= not work.early
            self._warned = False
            done.append((entries, work))
        if works:
            self._watch(now - works[0][0], works[0][1])
        return done

    def nap(self, now: float, most: float) -> float:
        """Seconds to sleep before the next poll, at most `most`."""
        if not self.works:
            return most
        rest = self.works[0][3].rest()
        if rest > SHORTEST_NAP_S:
            return min(most, rest)
        return min(most, max(SHORTEST_NAP_S, min((now - self.works[-1][0]) * _SHARE, LONGEST_NAP_S)))

    def fail(self, error: BaseException) -> None:
        """The runtime has ended with an error: nothing is waited for any more."""
        while self.works:
            _, _, entries, work = self.works.popleft()
            for entry in entries:
                if not entry.handle.done():
                    entry.handle.set_exception(error)
            work.abandon()

    def _watch(self, age: float, names: tuple[str, ...]) -> None:
        what = f"'{names[0]}'" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        if self._shutdown_s and age > self._shutdown_s:
            raise StallError(
                f"{what} has been under way for {age:.0f} s, longer than stall_shutdown_s: another rank or "
                "its device may have stopped, or be busy with work that waits for this one"
            )
        if self._warning_s and age > self._warning_s and not self._warned:
            self._warned = True
            logger.warning("%s has been under way for %.0f s", what, age)
