"""How this runtime waits for other ranks: the one loop behind every wait.

A wait spins for a moment, because on a healthy job the other rank is a few
microseconds away, then sleeps for a share of the time it has waited, so that a
long wait costs no core and adds little to itself. Nothing waits without asking
now and then whether a rank has failed, so nothing waits for ever for a dead one.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from contextlib import suppress

SPIN_S = 100e-6
"""Spinning before the first sleep; a thread wake-up costs about a quarter of it."""
SLEEP_SHARE = 0.125
"""A sleep lasts this share of the time waited so far, so it adds at most as much."""
LONGEST_SLEEP_S = 1e-3
LONGEST_IDLE_SLEEP_S = 0.05
CHECK_EVERY_S = 0.05


LONGEST_EXPECTED_SLEEP_S = 4e-3
"""MPI reads a socket only when it is asked; between two looks, no more may arrive than a socket holds."""


def patience(waited: float, *, idle: bool = False, expected: float = 0.0) -> float:
    """Seconds to sleep before the next look, after `waited` seconds; 0 while spinning.

    Args:
        idle: nobody on this rank waits for the answer, so a long sleep does no harm.
        expected: seconds in which there will be enough to do. Spinning is no use where
            that is long, and takes the core from whoever computes.
    """
    if expected > SPIN_S:
        return min(expected, LONGEST_EXPECTED_SLEEP_S)
    if waited < SPIN_S:
        return 0.0
    return min(waited * SLEEP_SHARE, LONGEST_IDLE_SLEEP_S if idle else LONGEST_SLEEP_S)


CROWDED_S = 3e-4
"""A yield that took longer went to a thread that computes: an undisturbed one takes half a microsecond."""
CROWDED_FOR_S = 0.5
NAP_S = 2e-6

_PR_SET_TIMERSLACK = 29  # prctl(2)


class Spin:
    """What a wait does between two looks while it spins: it gives way to other threads.

    `sched_yield` is the quickest way to do so where nobody computes on the core, and costs
    a whole time slice, milliseconds, where somebody does. So after a yield that took long,
    waits sleep for a moment instead, from which Linux wakes a thread that mostly sleeps at
    once; and they try a yield again half a second later.

    Used by one thread.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        give_way: Callable[[], None] = os.sched_yield,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock
        self._give_way = give_way
        self._sleep = sleep
        self._crowded_until = float("-inf")

    def __call__(self, now: float) -> None:
        """Give way; `now` is the clock's time."""
        if now < self._crowded_until:
            self._sleep(NAP_S)
            return
        self._give_way()
        after = self._clock()
        if after - now > CROWDED_S:
            self._crowded_until = after + CROWDED_FOR_S


def wake_on_time() -> None:
    """Have the sleeps of the calling thread end when they should: Linux may add 50 us, to save power."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


class Waiter:
    """Waits on conditions that another rank makes true.

    Args:
        check: called about every 50 ms while waiting; raises `RankLeftError` (or
            another error) when the wait can never end.
        clock: seconds that never go back.
    """

    def __init__(self, check: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._check = check
        self._clock = clock
        self._spin = Spin(clock)

    def soon(self, test: Callable[[], bool]) -> bool:
        """Look for as long as a wait spins; whether `test()` was true."""
        start = self._clock()
        while not test():
            now = self._clock()
            if now - start > SPIN_S:
                return False
            self._spin(now)
        return True

    def until(self, test: Callable[[], bool], *, expected: float = 0.0) -> None:
        """Return when `test()` is true; raise what `check` raises.

        Args:
            expected: seconds between two looks, if it is long; see `patience`.
        """
        start = checked = None
        while not test():
            now = self._clock()
            if start is None or checked is None:
                start = checked = now
            nap = patience(now - start, expected=expected)
            if not nap:
                self._spin(now)
                continue
            if now - checked > CHECK_EVERY_S:
                self._check()
                checked = now
            time.sleep(nap)
