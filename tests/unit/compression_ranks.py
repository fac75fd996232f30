"""Ranks as threads of one process, for compressors: a `Transport` with no MPI."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch


class Hub:
    """Connects the transports of a number of ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=20)
        self._values: list[Any] = [None] * size

    def all(self, rank: int, value: torch.Tensor) -> list[torch.Tensor]:
        """What every rank passed, in rank order."""
        self._values[rank] = value.clone()
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values


class HubTransport:
    """Implements `fusion.compression.Transport`."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self._hub = hub
        self._rank = rank
        self.sent = 0

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        self.sent += values.nbytes
        wide = torch.stack(self._hub.all(self._rank, values)).to(torch.float32)
        return (wide.sum(0) / self._hub.size).to(values.dtype)

    def gather(self, payload: torch.Tensor) -> Sequence[torch.Tensor]:
        self.sent += payload.nbytes
        return self._hub.all(self._rank, payload)


def on_ranks(size: int, work: Callable[[int, HubTransport], Any]) -> list[Any]:
    """What `work(rank, transport)` returns on each rank."""
    hub = Hub(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(rank, HubTransport(hub, rank)), range(size)))
