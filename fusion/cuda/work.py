"""An operation that the device has been given and may not have finished.

Made and asked on the cycle thread; `join` is called on callers' threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from fusion.cuda.device import Device

CHECK_EVERY_S = 0.05


class DeviceWork:
    """Implements `coordinator.executor.Work`.

    Args:
        device: that it runs on.
        event: after which it is complete.
        kept: what it needs until then.
        check: raises what NCCL has found out since.
        finished: called when it is complete, with how many seconds it took since it was launched.
    """

    early = True

    def __init__(
        self,
        device: Device,
        event: Any,
        kept: Sequence[Any],
        check: Callable[[], None],
        finished: Callable[[float], None],
    ) -> None:
        self._device = device
        self._event = event
        self._kept: Sequence[Any] = kept
        self._check = check
        self._finished = finished
        self._launched = self._checked = time.monotonic()

    def join(self) -> None:
        """What the calling thread's current stream is given from now on comes after the operation."""
        self._device.marker.join(self._event)

    def done(self) -> bool:
        """Whether it is complete. Raises what went wrong."""
        if self._device.passed(self._event):
            self._kept = ()
            self._finished(time.monotonic() - self._launched)
            return True
        now = time.monotonic()
        if now - self._checked > CHECK_EVERY_S:
            self._checked = now
            self._check()
        return False

    def rest(self) -> float:
        """Nothing says how long a device will take."""
        return 0.0

    def abandon(self) -> None:
        """Nobody will ask again: let the allocator wait for the device, and let go of what was kept."""
        self._device.keep_for_side(_tensors(self._kept))
        self._kept = ()


def _tensors(kept: Sequence[Any]) -> list[Any]:
    found = []
    for each in kept:
        if isinstance(each, list):
            found += _tensors(each)
        elif hasattr(each, "record_stream"):
            found.append(each)
    return found
