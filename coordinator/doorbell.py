"""How user threads wake the cycle thread.

Ringing is cheap and safe from any thread; rings between two waits count as one.
Built on `SimpleQueue` because its timed `get` is one C call that drops the GIL.
"""

from __future__ import annotations

import queue


class Doorbell:
    """A bell that one thread waits at and any thread may ring."""

    def __init__(self) -> None:
        self._rings: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._rung = False

    def ring(self) -> None:
        """Wake the waiting thread, or let its next wait return at once."""
        if not self._rung:
            self._rung = True
            self._rings.put(None)

    def wait(self, timeout: float) -> bool:
        """Sleep until rung or until `timeout` seconds are over; says which.

        The flag is cleared only after the token was taken: a ring in between is
        then either seen by the caller, who looks at its work next, or kept.
        """
        try:
            self._rings.get(timeout=timeout)
        except queue.Empty:
            return False
        self._rung = False
        return True
