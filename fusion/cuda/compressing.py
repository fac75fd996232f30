"""The inner loops of compressors on the device, from the kernels in `compressing.cu`. Cycle thread only.

The formats are plain: int8 codes and a float32 scale for each row; a bit for each
element, lowest first, and a float32 scale for each row; ascending int32 indices
and float32 values. Used by `codecs.py`, which has the places of these in a payload.
Work is given to the side stream; the host waits for nothing.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import torch

from fusion.cuda.device import THREADS, Device

CHUNK = 16 * THREADS
"""Elements that one thread block looks at, where there are no rows."""


@cache
def source() -> str:
    """The kernels, as CUDA C++."""
    return files("fusion.cuda").joinpath("compressing.cu").read_text()


class Compressing:
    """The kernels on one device.

    All tensors are contiguous and flat: values and totals of float32, codes of int8, bits of uint8, scales
    of float32, one for each `row` elements of the values.
    """

    def __init__(self, device: Device) -> None:
        self._device = device

    def quantize(
        self, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, row: int, seed: int = 0
    ) -> None:
        """Write codes in -127 to 127, and the scales.

        Args:
            values: what to encode.
            codes: one for each value.
            scales: the largest magnitude of each row over 127.
            row: elements that share a scale.
            seed: for rounding at random, so that the mean is right; 0 rounds to nearest.
        """
        self._launch("quantize", len(scales), values, codes, scales, len(values), row, np.uint64(seed))

    def add_quantized(
        self, codes: torch.Tensor, scales: torch.Tensor, total: torch.Tensor, row: int, sign: float = 1.0
    ) -> None:
        """Add `sign` times what codes and scales say to `total`."""
        self._launch("add_quantized", len(scales), codes, scales, total, len(total), row, sign)

    def signs(self, values: torch.Tensor, bits: torch.Tensor, scales: torch.Tensor, row: int) -> None:
        """Write bits, set where a value is not negative, and the mean magnitude of each row.

        Raises:
            ValueError: `row` is not a multiple of 8.
        """
        if row % 8:
            raise ValueError(f"signs are written byte by byte, so a row must be a multiple of 8, not {row}")
        self._launch("signs", len(scales), values, bits, scales, len(values), row)

    def add_signs(
        self, bits: torch.Tensor, scales: torch.Tensor, total: torch.Tensor, row: int, sign: float = 1.0
    ) -> None:
        """Add `sign` times plus or minus the scale to `total`."""
        self._launch("add_signs", len(scales), bits, scales, total, len(total), row, sign)

    def largest(self, values: torch.Tensor, indices: torch.Tensor, chosen: torch.Tensor) -> None:
        """Write indices, ascending, and values of the elements of largest magnitude.

        Of equal magnitudes the lower indices go first; NaN is larger than all.

        Args:
            values: less than 2^31.
            indices: int32.
            chosen: float32. As many are written as there is room for.

        Raises:
            ValueError: there is room for none, or for more than there are.
        """
        count = len(indices)
        if not 1 <= count <= len(values):
            raise ValueError(f"cannot choose {count} of {len(values)} elements")
        device, blocks = self._device, -(-len(values) // CHUNK)
        with device.on_side():
            where = device.torch_device
            # As `Search` in the source: two 32-bit words, and how many are wanted.
            search = torch.zeros(2, dtype=torch.int64, device=where)
            search[1] = count
            histogram = torch.zeros(256, dtype=torch.int64, device=where)
            for shift in (24, 16, 8, 0):
                self._launch("count_digits", blocks, values, search, histogram, len(values), shift)
                self._launch("choose_digit", 1, search, histogram, shift)
            above, equal = torch.empty(2, blocks, dtype=torch.int32, device=where).unbind()
            self._launch("count_chosen", blocks, values, search, above, equal, len(values))
            before = [each.cumsum(0, dtype=torch.int64) - each for each in (above, equal)]
            self._launch("write_chosen", blocks, values, search, *before, indices, chosen, len(values))

    def _launch(self, name: str, blocks: int, *arguments: Any) -> None:
        converted = [_argument(argument) for argument in arguments]
        self._device.launch(self._device.function(source(), name), blocks, converted)


def _argument(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return np.uint64(value.data_ptr())
    if isinstance(value, float):
        return np.float64(value)
    return value if isinstance(value, np.generic) else np.int64(value)
