"""The staging memory and the barrier of the ranks that combine inside a node.

Cycle thread only. Each rank has two halves for chunks going in, a vector for
results on their way between nodes, and a line with the number of barriers it
has entered and of announcements it has made. The halves alternate from chunk to chunk, over all collectives.

Guarantee on which every collective here relies: if a collective enters at least
one barrier between writing a half and reading the halves of others, and reads
only before its next barrier, then no half is overwritten while it is read. For
a rank writes the same half again two chunks later, thus after the barrier of the
chunk between, which the others enter only when they have finished reading.
"""

from __future__ import annotations

import mmap
import platform
import threading
from collections.abc import Callable
from functools import partial

import torch

from coordinator.waiting import Waiter
from fusion.channel import Channel
from fusion.shm import map_shared

LINE = 64
"""Bytes between counters, so that no two share a cache line."""
ALIGN = 4096
"""Slices and buffers begin at multiples of this many bytes."""


class NodeBuffer:
    """Staging memory of a group of ranks on one node.

    Attributes:
        rank, size: in the group.
        chunk_bytes: how much of a half is used at a time; the halves themselves may be larger.
        vector_bytes: size of a vector.
        meanwhile: called again and again while a barrier waits.
    """

    def __init__(
        self, memory: mmap.mmap, waiter: Waiter, *, rank: int, size: int, chunk_bytes: int, vector_bytes: int
    ) -> None:
        self.rank = rank
        self.size = size
        self.chunk_bytes = self._half_bytes = chunk_bytes
        self.vector_bytes = vector_bytes
        self._waiter = waiter
        self._counters = memoryview(memory)[: size * LINE].cast("Q")
        self._peers = [peer * (LINE // 8) for peer in range(size) if peer != rank]
        self._mine = rank * (LINE // 8)
        self._entered = 0
        self._announced = 0
        self._parity = 0
        self.meanwhile: Callable[[], object] | None = None
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        stride = 2 * chunk_bytes + vector_bytes
        begins = [_aligned(size * LINE) + peer * stride for peer in range(size)]
        self._halves = [
            [whole[at + half * chunk_bytes : at + (half + 1) * chunk_bytes] for at in begins]
            for half in (0, 1)
        ]
        self._vectors = [whole[at + 2 * chunk_bytes : at + stride] for at in begins]

    @classmethod
    def shared(
        cls, node: Channel, world: Channel, chunk_bytes: int, vector_bytes: int, waiter: Waiter
    ) -> NodeBuffer:
        """Memory of all ranks of a node. Collective over `world`; raises alike on all ranks."""
        purpose = "fusion buffers (chunk_kb" + (", fusion_threshold_mb)" if vector_bytes else ")")
        memory = map_shared(node, world, _total(node.size, chunk_bytes, vector_bytes), purpose)
        return cls(
            memory,
            waiter,
            rank=node.rank,
            size=node.size,
            chunk_bytes=chunk_bytes,
            vector_bytes=vector_bytes,
        )

    @classmethod
    def private(cls, chunk_bytes: int, vector_bytes: int, waiter: Waiter) -> NodeBuffer:
        """Memory of this rank alone: a node of one."""
        memory = mmap.mmap(-1, _total(1, chunk_bytes, vector_bytes))
        return cls(memory, waiter, rank=0, size=1, chunk_bytes=chunk_bytes, vector_bytes=vector_bytes)

    @property
    def nbytes(self) -> int:
        """All memory of the group."""
        return _total(self.size, self._half_bytes, self.vector_bytes)

    def use_chunks_of(self, chunk_bytes: int) -> None:
        """Use so much of a half from now on; between two collectives, on every rank of the group alike.

        Raises:
            ValueError: the halves are smaller than that.
        """
        if not ALIGN <= chunk_bytes <= self._half_bytes:
            raise ValueError(f"halves of {self._half_bytes} bytes have no room for chunks of {chunk_bytes}")
        self.chunk_bytes = chunk_bytes

    def flip(self) -> int:
        """The half to use for the next chunk; every rank of the group calls this alike."""
        self._parity ^= 1
        return self._parity

    def half(self, parity: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
        """A half of a rank of the group."""
        return self._halves[parity][rank].view(dtype)

    def vector(self, rank: int, dtype: torch.dtype) -> torch.Tensor:
        """The vector of a rank of the group."""
        return self._vectors[rank].view(dtype)

    def barrier(self) -> None:
        """Return when every rank of the group has entered as many barriers as this one.

        What any of them wrote before is then visible here.
        """
        self._entered += 1
        if self.size == 1:
            return
        counters, entered = self._counters, self._entered
        _fence()
        counters[self._mine] = entered
        for peer in self._peers:
            if counters[peer] < entered:
                self._waiter.until(partial(self._reached, peer, entered))
        _fence()

    def announce(self) -> int:
        """Tell the others that this rank has come to its next announcement; the number of it."""
        self._announced += 1
        _fence()
        self._counters[self._mine + 1] = self._announced
        return self._announced

    def announced(self, number: int) -> bool:
        """Whether every rank of the group has made so many announcements.

        What any of them wrote before is then visible here.
        """
        counters = self._counters
        for peer in self._peers:
            if counters[peer + 1] < number:
                return False
        _fence()
        return True

    def _reached(self, peer: int, entered: int) -> bool:
        if self.meanwhile is not None:
            self.meanwhile()
        return self._counters[peer] >= entered


def slices(count: int, owners: int, itemsize: int) -> list[tuple[int, int]]:
    """Divide `count` elements among owners: ranges of about equal size, aligned, maybe empty."""
    quantum = ALIGN // itemsize
    each = -(-count // (owners * quantum)) * quantum
    return [(min(owner * each, count), min((owner + 1) * each, count)) for owner in range(owners)]


def ranges(lo: int, hi: int, most: int) -> list[tuple[int, int]]:
    """Cut [lo, hi) into consecutive ranges of at most `most`."""
    return [(at, min(at + most, hi)) for at in range(lo, hi, most)]


def _total(size: int, chunk_bytes: int, vector_bytes: int) -> int:
    return _aligned(size * LINE) + size * (2 * chunk_bytes + vector_bytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


_fence_lock = threading.Lock()


def _full_fence() -> None:
    # Python has no fence. Releasing a lock and then acquiring one keeps memory operations
    # before it from passing those after it on the weakly ordered machines CPython runs on.
    with _fence_lock:
        pass
    with _fence_lock:
        pass


def _no_fence() -> None:
    # x86 keeps stores in order and loads in order (Intel SDM vol. 3, 9.2), which is all a barrier needs.
    pass


_fence = _no_fence if platform.machine() in ("x86_64", "AMD64", "i686") else _full_fence
