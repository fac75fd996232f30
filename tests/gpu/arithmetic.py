"""What the kernels of `copying.cu` compute, written with torch: the reference they are held against."""

from __future__ import annotations

import ctypes

import torch

from fusion.cuda.rules import CODES
from fusion.dtypes import to_torch

NAMES = {code: name for name, code in CODES.items()}


def memory(address: int, nbytes: int) -> torch.Tensor:
    """Bytes of host memory at an address."""
    return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)


def elements(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Elements of host memory at an address."""
    return memory(address, count * dtype.itemsize).view(dtype) if count else torch.empty(0, dtype=dtype)


def packed(x: torch.Tensor, acc: torch.dtype, order: int, scale: float) -> torch.Tensor:
    """Values as they stand in the buffer."""
    value = _scaled(x.to(_value_type(x.dtype)), scale)
    if not x.dtype.is_floating_point and scale != 1.0:
        value = value.to(x.dtype).to(torch.int64)
    if not order:
        return value.to(acc)
    ends = torch.iinfo(acc)
    bits = value.view(acc)
    ordered = torch.where(bits < 0, bits ^ ends.max, bits)
    return torch.where(value.isnan(), ends.max if order == 2 else ends.min, ordered)


def unpacked(acc: torch.Tensor, dtype: torch.dtype, order: int, divisor: int, scale: float) -> torch.Tensor:
    """What a tensor gets of the buffer."""
    value_type = _value_type(dtype)
    if order:
        ends = torch.iinfo(acc.dtype)
        value = torch.where(acc < 0, acc ^ ends.max, acc).view(value_type)
    else:
        value = acc.to(value_type)
    if divisor != 1:
        value = value.div(divisor, rounding_mode=None if dtype.is_floating_point else "trunc")
    return _scaled(value, scale).to(dtype)


def dtype_of(code: int) -> torch.dtype:
    """The torch dtype of a number in `copying.cu`."""
    return to_torch(NAMES[code])


def _value_type(dtype: torch.dtype) -> torch.dtype:
    if dtype == torch.float64:
        return dtype
    return torch.float32 if dtype.is_floating_point else torch.int64


def _scaled(value: torch.Tensor, scale: float) -> torch.Tensor:
    if scale == 1.0:
        return value
    return value * scale if value.dtype.is_floating_point else (value.double() * scale).to(torch.int64)
