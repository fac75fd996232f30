"""Packing and unpacking on the device, from the kernels in `copying.cu`. Cycle thread only."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import torch

from fusion.cuda.device import Device, Memory
from fusion.cuda.plan import Chunks
from fusion.cuda.rules import Rules


@cache
def source() -> str:
    """The kernels, as CUDA C++."""
    return files("fusion.cuda").joinpath("copying.cu").read_text()


class Table:
    """The addresses of some tensors, in device memory.

    They are sent again only when they differ from the last time; the side stream
    keeps an earlier kernel from seeing the later addresses.
    """

    def __init__(self, device: Device, length: int) -> None:
        self._device = device
        self._memory = device.memory(8 * length)
        self._last: list[int] = []

    def of(self, tensors: Sequence[torch.Tensor], kept: list[Any]) -> int:
        """The address of the table of these contiguous tensors; `kept` stays until it has been used."""
        pointers = [tensor.data_ptr() for tensor in tensors]
        if pointers != self._last:
            kept.append(self._device.upload(np.array(pointers, np.uint64), self._memory))
            self._last = pointers
        return self._memory.ptr


class Copier:
    """The two kernels for one kind of values."""

    def __init__(self, device: Device, rules: Rules) -> None:
        self._device = device
        self._rules = rules
        self._pack = device.function(source(), "pack", rules.defines)
        self._unpack = device.function(source(), "unpack", rules.defines)

    def pack(self, table: int, chunks: OnDevice, buffer: int) -> None:
        """Copy tensors to the buffer, prescaled and in the buffer's type."""
        self._device.launch(
            self._pack,
            chunks.blocks,
            (np.uint64(table), np.uint64(chunks.ptr), np.uint64(buffer), np.float64(self._rules.prescale)),
        )

    def unpack(self, table: int, chunks: OnDevice, buffer: int) -> None:
        """Copy the buffer to tensors: averaged, postscaled, rounded."""
        self._device.launch(
            self._unpack,
            chunks.blocks,
            (
                np.uint64(table),
                np.uint64(chunks.ptr),
                np.uint64(buffer),
                np.int64(self._rules.divisor),
                np.float64(self._rules.postscale),
            ),
        )


class OnDevice:
    """A table of chunks in device memory.

    Attributes:
        ptr: address.
        blocks: how many there are.
    """

    def __init__(self, device: Device, chunks: Chunks, kept: list[Any]) -> None:
        self._memory: Memory = device.memory(chunks.nbytes)
        kept.append(device.upload(chunks, self._memory))
        self.ptr = self._memory.ptr
        self.blocks = len(chunks)
