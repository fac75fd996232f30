"""What a coordinator is told when it is made."""

from __future__ import annotations

import msgspec


class Settings(msgspec.Struct, frozen=True):
    """What the coordinator needs to know; the same on every rank, but for the stall times."""

    fusion_threshold: int
    """Bytes of a fused response."""
    cycle_time_s: float
    cache_capacity: int
    """Requests that stay registered."""
    stall_warning_s: float
    stall_shutdown_s: float
