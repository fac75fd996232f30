"""The response cache: requests all ranks know, each under a slot number.

A registered request costs one bit a cycle to negotiate. Slots are given and
taken back only at points that all ranks reach with the same arguments, so the
tables of all ranks are always equal without a message of their own.

One name may have several slots (a metric that is a scalar in one step and a
vector in the next): both stay cached.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from coordinator.messages import Request

Slots = npt.NDArray[np.int64]

_MOST_BATCHES = 64


class Registry:
    """Agreed table of requests. Cycle thread only.

    Args:
        capacity: how many executed requests stay registered; the least recently
            used go first. Requests that have not run yet are never evicted, so
            the table may be larger than that for a while.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._requests: list[Request | None] = []
        self._slots: dict[Request, int] = {}
        self._by_name: dict[str, set[int]] = {}
        self._last_run = np.zeros(64, dtype=np.int64)
        self._runs = 0
        self._free: list[int] = []
        self._batches: dict[tuple[str, int], tuple[Sequence[Request], int, Slots]] = {}
        self.ambiguous = 0
        """How many names have several slots."""
        self.version = 0
        """Changes whenever a slot comes to mean something else."""

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def width(self) -> int:
        """Slots ever used: how many ready bits a cycle carries."""
        return len(self._requests)

    def slot(self, request: Request) -> int | None:
        """The slot of an equal request, if it is registered."""
        return self._slots.get(request)

    def slots(self, requests: Sequence[Request]) -> Slots | None:
        """The slots of these requests, or None if one of them is not registered.

        A step submits the same requests as the step before: comparing the two lists
        costs a fiftieth of looking every request up.
        """
        if not requests:
            return np.empty(0, dtype=np.int64)
        key = (requests[0].name, len(requests))
        known, version, slots = self._batches.get(key, ((), -1, None))
        if slots is not None and version == self.version and known == requests:
            return slots
        found = list(map(self._slots.get, requests))
        if None in found:
            return None
        slots = np.array(found, dtype=np.int64)
        if len(self._batches) >= _MOST_BATCHES:
            self._batches.clear()
        self._batches[key] = (requests, self.version, slots)
        return slots

    def request(self, slot: int) -> Request:
        found = self._requests[slot]
        if found is None:
            raise KeyError(f"slot {slot} is free")
        return found

    def variants(self, name: str) -> int:
        """How many different requests are registered under a name."""
        return len(self._by_name.get(name, ()))

    def add(self, request: Request) -> int:
        """Register a request; agreed, like every call that changes the table."""
        known = self._slots.get(request)
        if known is not None:
            return known
        if self._free:
            slot = heapq.heappop(self._free)
            self._requests[slot] = request
        else:
            slot = len(self._requests)
            self._requests.append(request)
            if slot >= len(self._last_run):
                self._last_run = np.concatenate([self._last_run, np.zeros_like(self._last_run)])
        self._slots[request] = slot
        siblings = self._by_name.setdefault(request.name, set())
        siblings.add(slot)
        self.ambiguous += len(siblings) == 2
        return slot

    def executed(self, slots: Slots) -> None:
        """Note that these slots just ran together, which makes them the last used."""
        self._runs += 1
        self._last_run[slots] = self._runs

    def evict(self) -> list[tuple[int, Request]]:
        """Drop the least recently used executed requests beyond the capacity."""
        if len(self._slots) <= self._capacity:
            return []
        ran = np.flatnonzero(self._last_run)
        excess = max(0, len(ran) - self._capacity)
        oldest_first = ran[np.argsort(self._last_run[ran], kind="stable")]
        return [(slot, self._forget(slot)) for slot in oldest_first[:excess].tolist()]

    def discard(self, name: str) -> list[tuple[int, Request]]:
        """Drop every request of a name, after the ranks disagreed about it."""
        return [(slot, self._forget(slot)) for slot in sorted(self._by_name.get(name, ()))]

    def _forget(self, slot: int) -> Request:
        request = self.request(slot)
        self.version += 1
        self._requests[slot] = None
        self._last_run[slot] = 0
        del self._slots[request]
        siblings = self._by_name[request.name]
        siblings.discard(slot)
        self.ambiguous -= len(siblings) == 1
        if not siblings:
            del self._by_name[request.name]
        heapq.heappush(self._free, slot)
        return request
