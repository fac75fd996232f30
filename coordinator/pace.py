"""When to begin the next cycle: pure decisions about time.

A cycle is cheap but not free, so tensors are gathered for up to `cycle_time_s`
before one starts, unless the buffer is full or somebody is waiting. A rank with
nothing to say takes part only now and then, so that an idle job costs nothing.
"""

from __future__ import annotations

SHORTEST_HEARTBEAT_S = 0.05
LONGEST_HEARTBEAT_S = 0.5
_SHARE = 0.25
_RETRY_SHARE = 0.1
_LONGEST_RETRY_S = 5e-3


def gathering_delay(
    now: float, *, nbytes: int, since: float, urged: bool, threshold: int, cycle_time_s: float
) -> float:
    """Seconds to wait for more tensors to fuse; 0 when the cycle should begin.

    Args:
        nbytes: bytes submitted since the last cycle.
        since: when the first of them came.
        urged: a caller waits for one of them.
        threshold: bytes of a full fusion buffer.
    """
    if urged or nbytes >= threshold:
        return 0.0
    return max(0.0, since + cycle_time_s - now)


def retry_delay(waited: float) -> float:
    """Seconds until the next cycle, when only other ranks can make this rank's
    tensors ready and the last cycles changed nothing for `waited` seconds."""
    return min(waited * _RETRY_SHARE, _LONGEST_RETRY_S)


def heartbeat(idle: float) -> float:
    """Seconds until the next cycle of a rank that has had nothing pending for `idle` seconds.

    It bounds how late this rank learns that another one leaves or has stalled.
    """
    return min(max(idle * _SHARE, SHORTEST_HEARTBEAT_S), LONGEST_HEARTBEAT_S)
