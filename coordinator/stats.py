"""What the runtime has done so far, as numbers.

`Stats` is a frozen snapshot that any thread may keep, print or subtract from a
later one. `Recorder` makes it.
"""

from __future__ import annotations

import msgspec


class Stats(msgspec.Struct, frozen=True):
    """Totals of this rank since `init()`.

    Attributes:
        cycles: negotiation cycles, idle ones included.
        responses: collectives that were run, of every kind.
        tensors: tensors that took part in them; a barrier has none.
        bytes: payload of those tensors on this rank.
        buffers: fused all-reduces; each used one fusion buffer or static bucket.
        reduced_tensors: tensors that were all-reduced.
        reduced_bytes: payload of those on this rank.
        compressed_bytes: of reduced_bytes, what was compressed.
        payload_bytes: what that became; this is what was moved in its place.
        queued_s: seconds that tensors waited to be drained, summed over tensors.
        negotiate_s: seconds spent agreeing on what is ready, waits for late ranks included.
        pack_s: seconds spent copying into fusion buffers, and compressing.
        reduce_s: seconds spent combining values, waits for other ranks included.
        unpack_s: seconds spent copying out of fusion buffers, and decompressing.
    """

    cycles: int = 0
    responses: int = 0
    tensors: int = 0
    bytes: int = 0
    buffers: int = 0
    reduced_tensors: int = 0
    reduced_bytes: int = 0
    compressed_bytes: int = 0
    payload_bytes: int = 0
    queued_s: float = 0.0
    negotiate_s: float = 0.0
    pack_s: float = 0.0
    reduce_s: float = 0.0
    unpack_s: float = 0.0

    @property
    def mean_tensors_per_buffer(self) -> float:
        """How well fusion worked; 0.0 before the first all-reduce."""
        return self.reduced_tensors / self.buffers if self.buffers else 0.0

    @property
    def compression_ratio(self) -> float:
        """How many times fewer bytes of all-reduces there were for compression; 1.0 without."""
        moved = self.reduced_bytes - self.compressed_bytes + self.payload_bytes
        return self.reduced_bytes / moved if moved else 1.0

    def since(self, earlier: Stats) -> Stats:
        """What was done between `earlier`, a snapshot of the same rank, and this one."""
        mine, theirs = msgspec.structs.asdict(self), msgspec.structs.asdict(earlier)
        return Stats(**{name: mine[name] - theirs[name] for name in mine})
