"""How this runtime waits for other ranks: the one loop behind every wait.

A wait spins for a moment, because on a healthy job the other rank is a few
microseconds away, then sleeps for a share of the time it has waited, so that a
long wait costs no core and adds little to itself. Nothing waits without asking
now and then whether a rank has failed, so nothing waits for ever for a dead one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

SPIN_S = 100e-6
"""Spinning before the first sleep; a thread wake-up costs about a quarter of it."""
SLEEP_SHARE = 0.125
"""A sleep lasts this share of the time waited so far, so it adds at most as much."""
LONGEST_SLEEP_S = 1e-3
LONGEST_IDLE_SLEEP_S = 0.05
CHECK_EVERY_S = 0.05


EXPECTED_SHARE = 0.25
"""Of a wait whose length can be guessed, a sleep lasts this share."""
LONGEST_EXPECTED_SLEEP_S = 2e-4
"""MPI reads a socket only when it is asked; between two looks, no more may arrive than a socket holds."""


def patience(waited: float, *, idle: bool = False, expected: float = 0.0) -> float:
    """Seconds to sleep before the next look, after `waited` seconds; 0 while spinning.

    Args:
        idle: nobody on this rank waits for the answer, so a long sleep does no harm.
        expected: how long such waits have lasted. Spinning is no use where a message
            takes longer, and takes the core from whoever computes.
    """
    if expected > SPIN_S:
        return min(max(expected, waited) * EXPECTED_SHARE, LONGEST_EXPECTED_SLEEP_S)
    if waited < SPIN_S:
        return 0.0
    return min(waited * SLEEP_SHARE, LONGEST_IDLE_SLEEP_S if idle else LONGEST_SLEEP_S)


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

    def until(self, test: Callable[[], bool], *, expected: float = 0.0) -> float:
        """Return when `test()` is true, with the seconds that took; raise what `check` raises.

        Args:
            expected: seconds it may take, see `patience`.
        """
        if test():
            return 0.0
        now = start = checked = self._clock()
        while not test():
            now = self._clock()
            nap = patience(now - start, expected=expected)
            if not nap:
                os.sched_yield()
                continue
            if now - checked > CHECK_EVERY_S:
                self._check()
                checked = now
            time.sleep(nap)
        return now - start
