"""What the runtime's own memory costs one rank, at least and at present. Read on any thread."""

from __future__ import annotations

import msgspec

LEAST_BUFFER_BYTES = 8 << 20
"""Of a fusion buffer between nodes or on a device: with fusion off, tensors still go through one."""

_MIB = 1 << 20


class MemoryReport(msgspec.Struct, frozen=True):
    """Bytes that the runtime holds for one rank, beside the tensors of the program.

    Attributes:
        buffers: fusion buffers in host memory; of those that the ranks of a node share, an equal part.
        arenas: gradients of static buckets in host memory: they take the place of the program's own.
        scratch: private room for partial results.
        device_buffers: fusion buffers on this rank's GPU.
        device_arenas: gradients of static buckets on it.
    """

    buffers: int = 0
    arenas: int = 0
    scratch: int = 0
    device_buffers: int = 0
    device_arenas: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(msgspec.structs.astuple(self))

    def __add__(self, other: MemoryReport) -> MemoryReport:
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return MemoryReport(*[mine + its for mine, its in pairs])

    def __str__(self) -> str:
        parts = [f"{key.replace('_', ' ')} {n / _MIB:.1f}" for key, n in msgspec.structs.asdict(self).items()]
        return f"{self.total / _MIB:.1f} MiB: {', '.join(parts)}"
