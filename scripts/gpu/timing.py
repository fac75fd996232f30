"""Times on the device and on the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def on_device(work: Callable[[], Any], stream: Any, repeats: int = 30) -> float:
    """Median microseconds between two events around `work` on a stream."""
    times = []
    for _ in range(repeats + 5):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(stream)
        work()
        after.record(stream)
        after.synchronize()
        times.append(before.elapsed_time(after) * 1e3)
    return statistics.median(times[5:])


def on_host(work: Callable[[], Any], after: Callable[[], Any], repeats: int = 200) -> float:
    """Median microseconds of the host in `work`; `after` waits for the device, untimed."""
    times = []
    for _ in range(repeats + 20):
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) * 1e6)
        after()
    return statistics.median(times[20:])
