"""Arenas: memory of static buckets, where gradients live and are reduced in place.

Created by the executor on the cycle thread, by agreement of all ranks; its
tensors are used on any thread. A tensor of an arena keeps the memory alive by
itself, so it outlives the arena and the runtime.
"""

from __future__ import annotations

import mmap
from math import prod

import torch

from coordinator.messages import ITEM_SIZE
from fusion.channel import Channel
from fusion.dtypes import to_torch
from fusion.shm import map_shared


class Arena:
    """One mapping with an equal part for each rank of the node.

    Attributes:
        number: the same on every rank; `Region.arena` of the requests that lie in it.
        nbytes: bytes of one rank's part.
    """

    def __init__(self, number: int, nbytes: int, memory: mmap.mmap, local_rank: int, local_size: int) -> None:
        self.number = number
        self.nbytes = nbytes
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        stride = _part_bytes(nbytes)
        self._parts = [whole[at : at + nbytes] for at in range(0, local_size * stride, stride)]
        self._mine = self._parts[local_rank]

    @classmethod
    def create(cls, number: int, nbytes: int, node: Channel, world: Channel) -> Arena:
        """Make an arena. Collective over `world`; raises alike on all ranks."""
        purpose = f'a gradient arena of {node.size} x {nbytes} bytes (buckets = "static")'
        memory = map_shared(node, world, node.size * _part_bytes(nbytes), purpose)
        return cls(number, nbytes, memory, node.rank, node.size)

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """A contiguous tensor in this rank's part, beginning `offset` bytes into it."""
        return view(self._mine, offset, prod(shape), dtype).view(shape)

    def peer(self, local_rank: int) -> torch.Tensor:
        """The part of a rank of this node, as bytes."""
        return self._parts[local_rank]


def view(memory: torch.Tensor, offset: int, count: int, dtype: str) -> torch.Tensor:
    """`count` elements of bytes `memory` from byte `offset` on.

    Raises:
        ValueError: the range is not aligned to its element size or not inside `memory`.
    """
    size = ITEM_SIZE[dtype]
    if offset % size or not 0 <= offset <= offset + count * size <= len(memory):
        raise ValueError(
            f"{count} elements of {dtype} at byte {offset} do not fit an arena of {len(memory)} bytes: "
            f"the offset must be a multiple of {size} and the end inside the arena"
        )
    return memory[offset : offset + count * size].view(to_torch(dtype))


def _part_bytes(nbytes: int) -> int:
    return max(-(-nbytes // mmap.PAGESIZE), 1) * mmap.PAGESIZE
