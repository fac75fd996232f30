"""The stall watch: says which tensors wait, for how long, and for which ranks.

Warnings double their interval, list only the ranks that are missing in full,
and come from one rank, so that a slow rank does not fill the log.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from coordinator.errors import StallError
from coordinator.reports import Report, rank_list, stalled_names

logger = logging.getLogger("fusion")

MOST_NAMES = 10


class StallWatch:
    """Decides when to ask about stalled tensors and what to say. Cycle thread only.

    Args:
        warning_s: age at which a tensor is reported; 0 turns reports off.
        shutdown_s: age at which everything is failed; 0 means never.
        ranks: what messages call the ranks; default their numbers.
    """

    def __init__(self, warning_s: float, shutdown_s: float, ranks: Sequence[int] | None = None) -> None:
        self._ranks = ranks
        self._warning_s = warning_s
        self._shutdown_s = shutdown_s
        self._next_warning = warning_s
        self._next_silence_warning = 0.0

    def due(self, oldest: float) -> bool:
        """Whether to ask all ranks, the oldest pending entry being `oldest` seconds old."""
        if oldest < self._warning_s:
            self._next_warning = self._warning_s
        warn = 0 < self._warning_s <= oldest and oldest >= self._next_warning
        return warn or 0 < self._shutdown_s <= oldest

    def warn(self, merged: Report, rank: int, size: int, joined: int) -> None:
        """Warn of what has waited too long, on rank 0; next when it is twice as old."""
        warning = self.describe(merged, size, joined)
        if warning is None:
            return
        self.warned(max(merged.ages.values()))
        if rank == 0:
            logger.warning("%s", warning)

    def warned(self, oldest: float) -> None:
        """A report was made: the next comes when twice the age is reached."""
        self._next_warning = max(2 * oldest, self._warning_s)

    def silence(self, waited: float) -> None:
        """A cycle has been open for `waited` seconds: some rank's cycle thread does not answer.

        Ranks answer twice a second even when they have nothing to do, so this is
        about a process that is stopped, or held in native code that keeps the GIL.

        Raises:
            StallError: it is longer than the limit.
        """
        text = f"some rank has not answered for {waited:.0f} s: its process is stopped or keeps the GIL"
        if 0 < self._shutdown_s <= waited:
            raise StallError(f"{text}. Gave up after stall_shutdown_s = {self._shutdown_s:g} s")
        if 0 < self._warning_s <= waited and waited >= self._next_silence_warning:
            logger.warning("%s", text)
            self._next_silence_warning = 2 * waited
        elif waited < self._warning_s:
            self._next_silence_warning = 0.0

    def describe(self, merged: Report, size: int, joined: int = 0) -> str | None:
        """The warning for a merged report, or None when nothing waits that long."""
        if self._warning_s <= 0:
            return None
        return self._text(stalled_names(merged, size, self._warning_s, joined))

    def verdict(self, merged: Report, size: int, joined: int = 0) -> StallError | None:
        """The error that ends the runtime when something waited too long."""
        if self._shutdown_s <= 0:
            return None
        text = self._text(stalled_names(merged, size, self._shutdown_s, joined))
        if text is None:
            return None
        return StallError(f"{text}. Gave up after stall_shutdown_s = {self._shutdown_s:g} s")

    def _text(self, stalled: list[tuple[str, float, int, int]]) -> str | None:
        if not stalled:
            return None
        shown = "; ".join(
            f"'{name}' for {age:.1f} s, submitted by {rank_list(having, self._ranks)}, "
            + (
                f"MISSING on {rank_list(missing, self._ranks)}"
                if missing
                else "submitted by all in different forms"
            )
            for name, age, having, missing in stalled[:MOST_NAMES]
        )
        more = f"; and {len(stalled) - MOST_NAMES} more" if len(stalled) > MOST_NAMES else ""
        return f"stalled: {shown}{more}"
