"""Arenas on a device: memory of static buckets, where gradients live and are reduced in place.

Made by the executor on the cycle thread, by agreement of all ranks; used on any
thread. Unlike the arenas of a node's shared memory, other ranks do not see them.
"""

from __future__ import annotations

from math import prod

import torch

from fusion.arena import view


class DeviceArena:
    """Memory of this rank alone.

    Attributes:
        number: the same on every rank; `Region.arena` of the requests that lie in it.
        nbytes: its size.
    """

    def __init__(self, number: int, memory: torch.Tensor) -> None:
        self.number = number
        self.nbytes = len(memory)
        self._memory = memory

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """A contiguous tensor that begins `offset` bytes into it."""
        return view(self._memory, offset, prod(shape), dtype).view(shape)
