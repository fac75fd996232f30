"""The double of the copying kernels, part of `doubles.py`: it computes with torch what they compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fusion.cuda.plan import CHUNK_TYPE
from tests.gpu.arithmetic import dtype_of, elements, memory, packed, unpacked


class Kernel:
    """`copying.cu`, one pair of types."""

    def __init__(self, defines: dict[str, int]) -> None:
        self._data, self._acc = dtype_of(defines["DATA"]), dtype_of(defines["ACC"])
        self._order = defines["ORDER"]

    def pack(self, blocks: int, parts: Any, chunks: Any, buffer: Any, scale: Any) -> None:
        for tensor, place in self._ends(blocks, int(parts), int(chunks), int(buffer)):
            place.copy_(packed(tensor, self._acc, self._order, float(scale)))

    def unpack(  # noqa: PLR0917 - as the kernel has it
        self, blocks: int, parts: Any, chunks: Any, buffer: Any, divisor: Any, scale: Any
    ) -> None:
        for tensor, place in self._ends(blocks, int(parts), int(chunks), int(buffer)):
            tensor.copy_(unpacked(place, self._data, self._order, int(divisor), float(scale)))

    def _ends(
        self, blocks: int, parts: int, chunks: int, buffer: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        table = memory(chunks, blocks * CHUNK_TYPE.itemsize).numpy().view(CHUNK_TYPE)
        for start, at, part, count in table.tolist():
            address = int(elements(parts + 8 * part, 1, torch.int64)[0])
            yield (
                elements(address + start * self._data.itemsize, count, self._data),
                elements(buffer + at * self._acc.itemsize, count, self._acc),
            )
