"""What a compressor is: a way to say a bucket of floats in fewer bytes.

A compressor is a frozen record of its settings. It sees one flat float32 tensor,
the bucket, and a `BucketInfo` that says which tensors lie in it; it knows nothing
of optimizers, requests or MPI, so whatever can be laid out flat can be compressed:
gradients, model updates, a message to one other rank.

Two ways to use one:

- `encode` and `decode`: the bucket as bytes and back, for whoever moves the bytes.
- `reduce`: the mean of the buckets of all ranks, through a `Transport`. Methods whose
  encoded form can be added up (`linear`) ride an all-reduce, so their cost does not grow
  with the number of ranks; the payloads of the others are gathered, and every rank
  decodes and adds them in rank order.

Guarantees: the same input, settings and key give the same bytes, on every rank and
in every run; the mean has the same bits on every rank; `decode` of a bucket that holds
a NaN holds a NaN. State, if there is any, is in the `Memory` that is passed in. Callable
from any thread; single-threaded inside.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from math import prod
from typing import Any, ClassVar, Protocol

import msgspec
import numpy as np
import torch

from coordinator.messages import ITEM_SIZE

FLOATS = frozenset(name for name in ITEM_SIZE if "float" in name)
"""Dtypes of tensors that can be compressed; in a bucket they are float32."""

_PAYLOAD_ALIGNMENT = 8


class Piece(msgspec.Struct, frozen=True):
    """One tensor in a bucket."""

    name: str
    shape: tuple[int, ...]
    offset: int
    """Index of its first element in the bucket."""

    @property
    def count(self) -> int:
        """Elements."""
        return prod(self.shape)

    def of(self, bucket: torch.Tensor) -> torch.Tensor:
        """Its part of the flat bucket, flat."""
        return bucket[self.offset : self.offset + self.count]


class BucketInfo(msgspec.Struct, frozen=True, dict=True):
    """Which tensors lie in a bucket, back to back and in row-major order."""

    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Sequence[int]]]) -> BucketInfo:
        """Lay out tensors, given as (name, shape), one after the other."""
        pieces = []
        offset = 0
        for name, shape in tensors:
            pieces.append(Piece(name, tuple(shape), offset))
            offset += pieces[-1].count
        return cls(tuple(pieces))

    @cached_property
    def count(self) -> int:
        """Elements of the bucket."""
        return sum(piece.count for piece in self.pieces)

    @property
    def nbytes(self) -> int:
        """Bytes of the bucket as float32, what a ratio is relative to."""
        return 4 * self.count


class Key(msgspec.Struct, frozen=True):
    """Where a compressor's random numbers come from: nothing else than these.

    The global generators of torch and NumPy are neither read nor changed.
    """

    seed: int
    """The same on all ranks, another one each time a bucket is sent."""
    rank: int = 0

    def shared(self) -> np.random.Generator:
        """Numbers that all ranks draw alike."""
        return _generator(self.seed, 0)

    def own(self) -> np.random.Generator:
        """Numbers of this rank alone."""
        return _generator(self.seed, 1 + self.rank)


class Memory:
    """What is remembered of one tensor from one time it is sent to the next.

    Attributes:
        residual: what has not got across so far, flat float32; None for nothing.
        basis: where PowerSGD starts from, float32; None before the first time.
    """

    __slots__ = ("basis", "residual")

    def __init__(self, residual: torch.Tensor | None = None, basis: torch.Tensor | None = None) -> None:
        self.residual = residual
        self.basis = basis


class Transport(Protocol):
    """The other ranks, as a compressor sees them. All ranks make the same calls in the same order."""

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """The mean over all ranks, new, of a flat tensor of float32, float16 or bfloat16;
        16-bit values are added in float32."""
        ...

    def gather(self, payload: torch.Tensor) -> Sequence[torch.Tensor]:
        """The bytes (flat uint8) of all ranks, in rank order."""
        ...


class Decoding(Protocol):
    """What adds decoded payloads up: a `Compressor`, or what does the same on a device."""

    def add(self, payload: torch.Tensor, info: BucketInfo, total: torch.Tensor, sign: int = 1) -> None:
        """See `Compressor.add`."""
        ...


class Compressor(msgspec.Struct, frozen=True):
    """Base of all methods; a subclass is one method, its fields are the settings.

    Class attributes:
        name: what it is called in a specification.
        paper: where it comes from.
        linear: its encoded form can be added up.
        unbiased: the expectation of what is decoded is what was encoded, without feedback.

    Attributes of every method:
        feedback: whether what did not get across is kept and added the next time, if there
            is a memory for it.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    linear: ClassVar[bool] = False
    unbiased: ClassVar[bool] = False

    @property
    def spec(self) -> str:
        """Method and settings in one line; `fusion.compression.parse` reads it back."""
        settings = (f"{field}={_written(getattr(self, field))}" for field in self.__struct_fields__)
        return ":".join(filter(None, (self.name, ",".join(settings))))

    @property
    def remembers(self) -> bool:
        """Whether it makes use of a `Memory`."""
        return bool(getattr(self, "feedback", False))

    def payload_bytes(self, info: BucketInfo) -> int:
        """Bytes that one rank contributes for a bucket: exactly the length of what `encode` returns,
        or of what `reduce` puts into all-reduces."""
        raise NotImplementedError

    def compression_ratio(self, info: BucketInfo) -> float:
        """How many times fewer bytes than the bucket in float32."""
        return info.nbytes / max(self.payload_bytes(info), 1)

    def encode(
        self, values: torch.Tensor, info: BucketInfo, key: Key, memories: Sequence[Memory] | None = None
    ) -> torch.Tensor:
        """The bucket as flat uint8; `values` is only read.

        Args:
            values: the bucket, flat float32, `info.count` elements.
            info: what lies in it.
            key: of the random numbers.
            memories: one for each piece, for methods that start from the last time.
        """
        raise NotImplementedError

    def decode(self, payload: torch.Tensor, info: BucketInfo) -> torch.Tensor:
        """The bucket that a payload stands for, flat float32, new."""
        total = torch.zeros(info.count)
        self.add(payload, info, total)
        return total

    def add(self, payload: torch.Tensor, info: BucketInfo, total: torch.Tensor, sign: int = 1) -> None:
        """Add the bucket that a payload stands for to `total`, or subtract it with `sign` -1."""
        total.add_(self.decode(payload, info), alpha=sign)

    def reduce(
        self,
        values: torch.Tensor,
        info: BucketInfo,
        key: Key,
        transport: Transport,
        memories: Sequence[Memory] | None = None,
        *,
        keep: bool = True,
    ) -> torch.Tensor:
        """The mean over all ranks of what their buckets are decoded to, flat float32, new.

        On return `values` holds what did not get across: what it held, less what this
        rank's payload is decoded to. So the sum over ranks of what they held is the
        number of ranks times the mean, and the sum of what they hold afterwards.

        Args:
            values: this rank's bucket, overwritten.
            info: what lies in it, the same on all ranks.
            key: its seed is the same on all ranks.
            transport: the other ranks.
            memories: as for `encode`; a basis is updated.
            keep: whether what did not get across is wanted; if not, `values` holds anything afterwards.
        """
        payload = self.encode(values, info, key, memories)
        return reduce_payloads(self, payload, info, transport, values if keep else None)


def reduce_payloads(
    decoding: Decoding,
    payload: torch.Tensor,
    info: BucketInfo,
    transport: Transport,
    values: torch.Tensor | None,
) -> torch.Tensor:
    """The mean of what the payloads of all ranks stand for, added in rank order, flat float32, new.

    Args:
        decoding: of the payloads.
        payload: of this rank.
        info: the bucket.
        transport: the other ranks.
        values: if not None, what `payload` stands for is subtracted from it.
    """
    gathered = transport.gather(payload)
    total = torch.zeros(info.count, device=payload.device)
    for other in gathered:
        decoding.add(other, info, total)
    if values is not None:
        decoding.add(payload, info, values, sign=-1)
    # By a tensor: torch on a device would multiply by the reciprocal of a number, which rounds differently.
    return total.div_(total.new_full((), len(gathered)))


def payload_of(*parts: torch.Tensor) -> torch.Tensor:
    """Tensors back to back as bytes, widest items first so that each can be viewed in place."""
    flat = [part.reshape(-1).view(torch.uint8) for part in parts]
    nbytes = sum(len(part) for part in flat)
    padding = padded(nbytes) - nbytes
    if len(flat) == 1 and not padding:
        return flat[0]
    return torch.cat([*flat, torch.zeros(padding, dtype=torch.uint8)])


def padded(nbytes: int) -> int:
    """The length of a payload of so many bytes: gathered payloads then stay aligned."""
    return -(-nbytes // _PAYLOAD_ALIGNMENT) * _PAYLOAD_ALIGNMENT


def parts_of(payload: torch.Tensor, *counts: tuple[torch.dtype, int]) -> list[torch.Tensor]:
    """The tensors that `payload_of` was given, as views.

    Raises:
        ValueError: the payload has another length than it should have.
    """
    expected = padded(sum(count * dtype.itemsize for dtype, count in counts))
    if len(payload) != expected:
        raise ValueError(
            f"a payload of {len(payload)} bytes cannot be decoded: {expected} were expected. Sender and "
            "receiver need the same compressor and bucket"
        )
    parts = []
    at = 0
    for dtype, count in counts:
        stop = at + count * dtype.itemsize
        parts.append(payload[at:stop].view(dtype))
        at = stop
    return parts


def check_ratio(ratio: Any, method: str) -> float:
    """A share of the elements, checked.

    Raises:
        ValueError: it is not above 0 and at most 1.
    """
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio <= 1:
        raise ValueError(
            f"{method}: ratio is the share of the elements that is sent, above 0 and at most 1 "
            f"(0.01 sends one in a hundred), not {ratio!r}"
        )
    return float(ratio)


def check_whole(value: Any, lowest: int, highest: int, what: str) -> None:
    """Refuse what is not a whole number from `lowest` to `highest`.

    Raises:
        ValueError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        raise ValueError(f"{what} must be a whole number from {lowest} to {highest}, not {value!r}")


def share(ratio: float, count: int) -> int:
    """How many of `count` elements a ratio means: at least one, if there are any."""
    return min(count, max(1, round(ratio * count)))


def _written(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return repr(value) if isinstance(value, float) else str(value)


def _generator(seed: int, stream: int) -> np.random.Generator:
    # SFC64 is the fastest of NumPy's generators; SeedSequence keeps the streams of ranks apart.
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence((seed, stream))))
