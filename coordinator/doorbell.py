"""How user threads wake the cycle thread.

Ringing is cheap and safe from any thread; rings between two waits count as one.

Built on a bare lock, held while the bell is silent: its timed `acquire` is one C
call that drops the GIL. A `SimpleQueue` is not fit for this: in CPython 3.11 its
`get` may wait for ever when a timeout of microseconds runs out inside the call.
"""

from __future__ import annotations

import threading
from contextlib import suppress


class Doorbell:
    """A bell that one thread waits at and any thread may ring."""

    def __init__(self) -> None:
        self._silence = threading.Lock()
        self._silence.acquire()
        self._rung = False

    def ring(self) -> None:
        """Wake the waiting thread, or let its next wait return at once."""
        if not self._rung:
            self._rung = True
            with suppress(RuntimeError):  # Another thread rang in the same moment.
                self._silence.release()

    def wait(self, timeout: float) -> bool:
        """Sleep until rung or until `timeout` seconds are over; says which.

        The flag is cleared only after the bell was heard: a ring in between is
        left out, and what it was about is seen by the caller, who looks next.
        """
        heard = self._silence.acquire(timeout=timeout)
        if heard:
            self._rung = False
        return heard
