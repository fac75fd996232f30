"""Changing settings while the job runs: what the control plane knows of tuning.

A `Tuner` lives on one rank, is told what each cycle ran, and says which settings it
wants next. The coordinator of that rank then raises `Flag.TUNE`, and the wish
travels in the exchange of reports that any flag leads to. So every rank takes the
new settings at the end of the same cycle, between two responses, when nothing is
in flight. Cycle thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from coordinator.messages import Response

logger = logging.getLogger("fusion")


class Knobs(msgspec.Struct, frozen=True):
    """The settings that may change while the job runs, in the units of the configuration."""

    fusion_threshold_mb: float
    cycle_time_ms: float
    chunk_kb: int
    ring_segment_kb: int
    hierarchy: str

    @property
    def fusion_threshold(self) -> int:
        """Bytes of a fused response."""
        return int(self.fusion_threshold_mb * (1 << 20))

    @property
    def cycle_time_s(self) -> float:
        return self.cycle_time_ms / 1e3


class Tuner(Protocol):
    """Decides which settings to try. One rank of a job has one."""

    @property
    def wanted(self) -> Knobs | None:
        """What to change to; None while the present settings are being looked at, and at the end."""
        ...

    @property
    def finished(self) -> bool:
        """Whether it wants nothing further, and need not be told anything."""
        ...

    def ran(self, responses: Sequence[Response], at: float) -> None:
        """A cycle, agreed on at `at` seconds, ran these responses."""
        ...

    def disturbed(self) -> None:
        """What runs now is not the usual work: some rank has joined."""
        ...

    def applied(self) -> None:
        """All ranks run with `wanted` from now on."""
        ...

    def close(self) -> None:
        """The job ends, or tuning is complete: keep what was found."""
        ...


class Tuning:
    """One rank's part in tuning.

    An exception of the tuner ends the tuning, not the job: the settings then stay
    what they are.

    Args:
        apply: makes the data plane of this rank use other settings from the next response on.
        tuner: on the rank that decides.
    """

    def __init__(self, apply: Callable[[Knobs], None], tuner: Tuner | None = None) -> None:
        self._apply = apply
        self.tuner = tuner
        """None on other ranks, and when tuning is over."""

    @property
    def wanted(self) -> Knobs | None:
        """What this rank wants all ranks to change to."""
        return None if self.tuner is None else self.tuner.wanted

    def ran(self, responses: Sequence[Response], at: float, joined: int) -> None:
        """Tell the tuner, if there is one; `joined` is the mask of ranks that have joined."""
        tuner = self.tuner
        if tuner is not None:
            self._guarded(tuner.disturbed if joined else lambda: tuner.ran(responses, at))
            self._retire()

    def take(self, knobs: Knobs) -> None:
        """Every rank has agreed: use these settings."""
        self._apply(knobs)
        if self.tuner is not None:
            self._guarded(self.tuner.applied)
            self._retire()

    def close(self) -> None:
        """Let the tuner keep what it has found; it is not asked again."""
        tuner, self.tuner = self.tuner, None
        if tuner is not None:
            try:
                tuner.close()
            except Exception:
                logger.exception("the result of tuning could not be kept")

    def _retire(self) -> None:
        if self.tuner is not None and self.tuner.finished:
            self.close()

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception:
            logger.exception("tuning has failed; the settings stay as they are now")
            self.tuner = None
