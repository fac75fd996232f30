"""The records that cross boundaries: what a rank asks for, and what the ranks agreed to do.

Every type here is frozen, so a record may be shared between threads, hashed,
cached and compared without a lock. Nothing here knows torch, NumPy or MPI: a
tensor is a name, a shape, a dtype name and a device kind.
"""

from __future__ import annotations

from enum import IntEnum
from functools import cached_property
from math import prod

import msgspec

ANY = -1
"""A dimension that may differ between ranks (the first one of an all-gather)."""


class OpKind(IntEnum):
    """Which collective a request asks for."""

    ALLREDUCE = 0
    BROADCAST = 1
    ALLGATHER = 2
    ALLTOALL = 3
    REDUCESCATTER = 4
    BARRIER = 5
    ARENA = 6
    """Make a shared memory arena; agreed by all ranks like any other operation."""
    JOIN = 7
    """This rank has no more data: the others go on without it until all have joined."""
    PROCESS_SET = 8
    """Make a set of ranks, whose dimensions are the ranks, or remove one."""


class ReduceOp(IntEnum):
    """How values of different ranks are combined; the numbers are Horovod's."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


ITEM_SIZE = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}
"""Bytes of one element, by dtype name; a dtype that is not here is not supported."""


class Region(msgspec.Struct, frozen=True, gc=False):
    """Where a tensor already lies in memory that all ranks of a node share.

    A request with a region is reduced where it is, with no copy in or out.
    """

    arena: int
    """Number of the arena, the same on every rank."""
    offset: int
    """First byte inside the arena."""


class Request(msgspec.Struct, frozen=True, dict=True):
    """One rank's wish to run a collective on one tensor, or on a group as one.

    Two ranks mean the same collective exactly when their requests are equal, so
    everything that must match between ranks is a field, and nothing else is.
    """

    name: str
    kind: OpKind
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    op: ReduceOp = ReduceOp.SUM
    root_rank: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    device: str = "cpu"
    codec: str = "none"
    """How values are compressed on the way; see `fusion.compression.parse`."""
    terms: str = ""
    """What else the ranks must have in common, in words; only compared."""
    region: Region | None = None

    @cached_property
    def nbytes(self) -> int:
        """Payload in bytes on one rank; free dimensions count as one."""
        return sum(
            ITEM_SIZE[dtype] * prod(abs(dim) for dim in shape)
            for dtype, shape in zip(self.dtypes, self.shapes, strict=True)
        )

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Its tensors; made once, however many plans the request is in."""
        return tuple(Part(self, index) for index in range(len(self.dtypes)))

    def encode(self) -> bytes:
        """The same bytes for equal requests, on every rank and in every run."""
        return _ENCODER.encode(self)


_ENCODER = msgspec.msgpack.Encoder()


class Part(msgspec.Struct, frozen=True, dict=True):
    """One tensor of one request: a group may be spread over several responses."""

    request: Request
    index: int

    @property
    def dtype(self) -> str:
        return self.request.dtypes[self.index]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.request.shapes[self.index]

    @cached_property
    def count(self) -> int:
        """Number of elements; free dimensions count as one."""
        return prod(map(abs, self.shape))

    @cached_property
    def nbytes(self) -> int:
        return self.count * ITEM_SIZE[self.dtype]


class Response(msgspec.Struct, frozen=True, dict=True):
    """What all ranks agreed to run as one collective, in this order of parts.

    All parts share kind, op, dtype, scale factors, root, device and codec. Only
    all-reduces are fused; any other response has the parts of one request.
    """

    kind: OpKind
    dtype: str
    parts: tuple[Part, ...]

    @property
    def first(self) -> Request:
        """Any request of the response: what they share can be read from it."""
        return self.parts[0].request

    @cached_property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the request of each part."""
        return tuple(part.request.name for part in self.parts)

    @cached_property
    def grouped(self) -> bool:
        """Whether some request has more parts than one, which other responses may have."""
        return any(len(part.request.shapes) != 1 for part in self.parts)
