"""One message for everything a client or the server has to say: a header and tensors, as bytes.

A message is a 1-D uint8 tensor: three int64 (address, length of the header, length
of all), the header in MessagePack, then the tensors at multiples of 64 bytes, so
that they can be used where they lie. `pack` copies each tensor once; `unpack` copies
none. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

PREFIX = 24
_ALIGNMENT = 64


class Work(Struct, frozen=True, tag="work"):
    """Server to client: train this model. Tensors: values, counters.

    Attributes:
        version: of the model.
        turn: how often the client has been sent one before.
        accepted: whether the client's previous update was used.
    """

    version: int
    turn: int
    accepted: bool


class Stop(Struct, frozen=True, tag="stop"):
    """Server to client: send nothing more but a `Goodbye`.

    Attributes:
        accepted: as in `Work`.
    """

    accepted: bool


class Change(Struct, frozen=True, tag="change"):
    """Client to server, or to all ranks: an update. Tensors: payload of the parameters' change,
    change of the buffers, counters."""

    client: int
    examples: int
    version: int
    loss: float
    seconds: float


class Regret(Struct, frozen=True, tag="regret"):
    """Client to server: there is no update, see `workbench.Absence`."""

    client: int
    reason: str
    failed: bool


class Goodbye(Struct, frozen=True, tag="goodbye"):
    """Client to server: its last message."""

    client: int


Header = Work | Stop | Change | Regret | Goodbye


class Message(Struct, frozen=True):
    """A message that has arrived.

    Attributes:
        tensors: views into the message.
        nbytes: of the whole message.
    """

    address: int
    header: Header
    tensors: tuple[Tensor, ...]
    nbytes: int


class _Envelope(Struct, frozen=True):
    header: Header
    tensors: list[tuple[str, tuple[int, ...]]]


def pack(address: int, header: Header, tensors: Sequence[Tensor] = ()) -> Tensor:
    """The bytes of a message."""
    specs = [(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for tensor in tensors]
    head = msgspec.msgpack.encode(_Envelope(header, specs))
    places, total = _places(len(head), [tensor.nbytes for tensor in tensors])
    message = torch.zeros(total, dtype=torch.uint8)
    message[:PREFIX].view(torch.int64).copy_(torch.tensor([address, len(head), total]))
    message[PREFIX : PREFIX + len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    for tensor, place in zip(tensors, places, strict=True):
        if tensor.numel():
            message[place : place + tensor.nbytes].view(tensor.dtype).copy_(tensor.detach().reshape(-1))
    return message


def unpack(message: Tensor) -> Message:
    """What `pack` was given.

    Args:
        message: its storage begins at a multiple of 64 bytes of its own.
    """
    address, length, total = prefix(message)
    envelope = msgspec.msgpack.decode(message[PREFIX : PREFIX + length].numpy().tobytes(), type=_Envelope)
    dtypes = [getattr(torch, name) for name, _ in envelope.tensors]
    sizes = [
        torch.Size(shape).numel() * dtype.itemsize
        for dtype, (_, shape) in zip(dtypes, envelope.tensors, strict=True)
    ]
    places, _ = _places(length, sizes)
    tensors = tuple(
        message[place : place + size].view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)
        for place, size, dtype, (_, shape) in zip(places, sizes, dtypes, envelope.tensors, strict=True)
    )
    return Message(address, envelope.header, tensors, total)


def prefix(message: Tensor) -> tuple[int, int, int]:
    """Address, length of the header and length of all, of a message or its beginning."""
    address, length, total = message[:PREFIX].view(torch.int64).tolist()
    return address, length, total


def unpack_all(messages: Tensor) -> Iterator[Message]:
    """Messages that lie one behind the other; each is a multiple of 64 bytes long."""
    start = 0
    while start < messages.numel():
        total = prefix(messages[start:])[2]
        yield unpack(messages[start : start + total])
        start += total


def _places(head: int, sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where the tensors begin, and the length of all."""
    places, end = [], _aligned(PREFIX + head)
    for size in sizes:
        places.append(end)
        end = _aligned(end + size)
    return places, end


def _aligned(place: Any) -> int:
    return int(-(-place // _ALIGNMENT) * _ALIGNMENT)
