"""Which neighbours to merge: the exact optimum, and the published rule it is compared with.

Tensors are ready in the order given; one channel carries one group after the
other. A group of tensors i..j begins when its last one is ready and the channel is
free, so with E[j] the time at which the first j are done,

    E[j] = min over i < j of max(E[i], ready[j]) + cost(i, j),    E[0] = 0,

which is exact for every cost function, because what happens after i depends on
the past through E[i] alone, and earlier is never worse. O(L^2) evaluations of
the cost, a row at a time.

MG-WFBP (Shi, Chu, Li: "MG-WFBP: efficient data communication for distributed synchronous SGD
algorithms", 2019) merges i with i + 1 whenever i + 1 is ready before i could have paid
its latency. That is right for two tensors and not for a chain of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Cost = Callable[[Indices, int], Floats]
"""(starts, stop) -> seconds of each group [start, stop)."""
Group = tuple[int, int]


def optimal(ready: Sequence[float], cost: Cost) -> tuple[list[Group], float]:
    """The groups that are done earliest, as ranges [start, stop), and when that is.

    Args:
        ready: seconds, ascending.
        cost: see `Cost`.
    """
    count = len(ready)
    done = np.zeros(count + 1)
    before = np.zeros(count + 1, dtype=np.int64)
    starts = np.arange(count, dtype=np.int64)
    for stop in range(1, count + 1):
        candidates = np.maximum(done[:stop], ready[stop - 1]) + cost(starts[:stop], stop)
        # Of equals the longest group: fewer messages for the same time.
        best = int(np.argmin(candidates))
        done[stop], before[stop] = candidates[best], best
    groups: list[Group] = []
    stop = count
    while stop:
        groups.append((int(before[stop]), stop))
        stop = int(before[stop])
    return groups[::-1], float(done[-1])


def duration(groups: Sequence[Group], ready: Sequence[float], cost: Cost) -> float:
    """When these groups are done."""
    now = 0.0
    for start, stop in groups:
        now = max(now, ready[stop - 1]) + float(cost(np.array([start]), stop)[0])
    return now


def mg_wfbp(
    ready: Sequence[float], nbytes: Sequence[int], latency_s: float, s_per_byte: float
) -> list[Group]:
    """The groups of MG-WFBP's rule for a cost of `latency_s + s_per_byte * bytes`."""
    groups: list[Group] = []
    start, free, size = 0, 0.0, 0
    for index in range(len(ready)):
        size += nbytes[index]
        begin = max(free, ready[index])
        if index + 1 < len(ready) and ready[index + 1] < begin + latency_s:
            continue
        groups.append((start, index + 1))
        free = begin + latency_s + s_per_byte * size
        start, size = index + 1, 0
    return groups
