"""Packing and unpacking: checked against torch's `_foreach_copy_` on random data, and timed. Prints JSON.

Bars: 80 % of the bandwidth of a plain device copy for the ResNet-50 gradients, 50 us
a launch for 1000 tensors of 256 floats.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import torch

from coordinator.messages import OpKind, ReduceOp, Request
from fusion.cuda.copying import Copier, OnDevice, Table
from fusion.cuda.device import Device, Marker, load_modules
from fusion.cuda.plan import CHUNK, aligned, pieces_of
from fusion.cuda.rules import Rules, rules_of
from fusion.dtypes import to_torch
from scripts.benchmarks.shapes import SETS
from scripts.gpu.timing import on_device

LENGTHS = (1, 7, 256, 4096, 4097, 100_003, 0, 16)


class Packing:
    """One set of tensors, its buffer and its kernels."""

    def __init__(self, device: Device, rules: Rules, tensors: list[torch.Tensor]) -> None:
        counts = [tensor.numel() for tensor in tensors]
        (piece,) = pieces_of(counts, sum(map(aligned, counts)) + CHUNK)
        self._kept: list[Any] = [tensors]
        self.tensors = tensors
        self.buffer = torch.empty(piece.count, dtype=to_torch(rules.buffer_dtype), device="cuda")
        self._copier = Copier(device, rules)
        self._chunks = OnDevice(device, piece.chunks, self._kept)
        self._table = Table(device, len(tensors))
        self._address = self._table.of(tensors, self._kept)
        begins, at = [], 0
        for count in counts:
            at = aligned(at)
            begins.append(at)
            at += count
        self.views = [self.buffer[b : b + c] for b, c in zip(begins, counts, strict=True)]

    def pack(self) -> None:
        """Launch it."""
        self._copier.pack(self._address, self._chunks, self.buffer.data_ptr())

    def unpack(self) -> None:
        """Launch it."""
        self._copier.unpack(self._address, self._chunks, self.buffer.data_ptr())


def main() -> None:
    """Check, time, print."""
    torch.cuda.set_device(0)
    modules = load_modules()
    device = Device(Marker(modules, 0), modules)
    result: dict[str, Any] = {"checked": check(device)}
    for name in ("resnet50", "tiny1000", "one64mib"):
        result[name] = timed(device, name)
    result["bar resnet50 >= 0.8 of a copy"] = result["resnet50"]["pack_share_of_copy"] >= 0.8
    result["bar 1000 x 256 <= 50 us"] = result["tiny1000"]["pack_us"] <= 50.0
    print(json.dumps(result))


def timed(device: Device, name: str) -> dict[str, float]:
    """Packing and unpacking beside one copy of as many bytes and beside torch's own way."""
    stream = torch.cuda.ExternalStream(device.side, device=0)
    tensors = [torch.randn(shape, device="cuda") for shape in SETS[name]()]
    packing = Packing(device, plain("float32"), tensors)
    flat_tensors = [tensor.view(-1) for tensor in tensors]
    nbytes = 4 * sum(tensor.numel() for tensor in tensors)
    flat, other = (torch.empty(nbytes // 4, device="cuda") for _ in range(2))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        copy = on_device(lambda: other.copy_(flat), stream)
        foreach = on_device(lambda: torch._foreach_copy_(packing.views, flat_tensors), stream)
    pack, unpack = on_device(packing.pack, stream), on_device(packing.unpack, stream)
    return {
        "copy_us": round(copy, 1),
        "pack_us": round(pack, 1),
        "unpack_us": round(unpack, 1),
        "foreach_us": round(foreach, 1),
        "pack_share_of_copy": round(copy / pack, 3),
        "pack_gb_s": round(2 * nbytes / pack / 1e3, 1),
    }


def plain(dtype: str) -> Rules:
    """The rules of a sum."""
    return rules_of(Request("t", OpKind.ALLREDUCE, (dtype,), ((1,),), op=ReduceOp.SUM), dtype, 2, exact=True)


def check(device: Device) -> str:
    """Hold packing and unpacking against torch, for all dtypes, aligned and not."""
    count = 0
    for dtype in ("uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"):
        for shift in (0, 1):
            for scale in (1.0, 0.5):
                rules = msgspec.structs.replace(plain(dtype), prescale=scale, postscale=scale)
                _check(device, rules, shift)
                count += 1
    return f"{count} cases of pack and unpack equal to torch"


def _check(device: Device, rules: Rules, shift: int) -> None:
    dtype = to_torch(rules.dtype)
    tensors = [
        torch.randn(length + shift, device="cuda", dtype=torch.float64).mul_(50).to(dtype)[shift:]
        for length in LENGTHS
    ]
    torch.cuda.synchronize()
    packing = Packing(device, rules, tensors)
    packing.pack()
    device.synchronize()
    wanted = [torch.empty(view.shape, dtype=view.dtype, device="cuda") for view in packing.views]
    torch._foreach_copy_(
        wanted, [_scaled(tensor, rules.prescale).to(packing.buffer.dtype) for tensor in tensors]
    )
    for view, expected in zip(packing.views, wanted, strict=True):
        torch.testing.assert_close(view, expected, rtol=0.0, atol=0.0, equal_nan=True)
    for tensor in tensors:
        tensor.zero_()
    torch.cuda.synchronize()
    packing.unpack()
    device.synchronize()
    for tensor, expected in zip(tensors, wanted, strict=True):
        back = _scaled(expected, rules.postscale).to(dtype)
        torch.testing.assert_close(tensor, back, rtol=0.0, atol=0.0, equal_nan=True)


def _scaled(values: torch.Tensor, scale: float) -> torch.Tensor:
    """As the kernels do: 16-bit floats in float32, integers in double and cut."""
    if scale == 1.0:
        return values
    if not values.dtype.is_floating_point:
        return (values.double() * scale).to(values.dtype)
    return values.float() * scale if values.dtype.itemsize == 2 else values * scale


if __name__ == "__main__":
    main()
