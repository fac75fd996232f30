"""Compressors on a device: the methods of `fusion.compression` by the kernels of `compressing.cu`.

Used by `fusion.collectives.device_compressed` on the cycle thread, inside
`Device.on_side`. The host waits for nothing and reads no value.

A payload is laid out by the method's own compressor, so either can decode what the
other has encoded, and the bytes are the same with two exceptions: `int8` rounding at
random draws other random numbers here, and a scale of `onebit`, a mean, may differ in
its last bits, since the sum is made in another order. What a payload stands for is
added with the same bits.

Cost beside what is launched, for a bucket of S bytes in p ranks: `int8` and `onebit`
read it twice to encode, `topk` six times; each of the p payloads costs S read and
written to decode, of `topk` only the elements sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusion.compression.base import BucketInfo, Key, Memory, Transport, reduce_payloads
from fusion.compression.cast import BFloat16, Float16
from fusion.compression.exchange import Reducing
from fusion.compression.onebit import OneBit
from fusion.compression.quantize import Int8
from fusion.compression.registry import parse
from fusion.compression.topk import TopK
from fusion.cuda.compressing import Compressing

_SEEDS = 1 << 63


class _Gathered:
    """Base: every rank gets all payloads."""

    def encode(self, values: torch.Tensor, info: BucketInfo, key: Key) -> torch.Tensor:
        raise NotImplementedError

    def add(self, payload: torch.Tensor, info: BucketInfo, total: torch.Tensor, sign: int = 1) -> None:
        raise NotImplementedError

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
        """See `fusion.compression.Compressor.reduce`."""
        payload = self.encode(values, info, key)
        return reduce_payloads(self, payload, info, transport, values if keep else None)


class DeviceInt8(_Gathered):
    """`int8`; see `fusion.compression.quantize`."""

    def __init__(self, method: Int8, kernels: Compressing) -> None:
        self._method = method
        self._kernels = kernels

    def encode(self, values: torch.Tensor, info: BucketInfo, key: Key) -> torch.Tensor:
        """Scales, then codes."""
        payload = _zeros(self._method.payload_bytes(info), values)
        scales, codes = self._method.parts(payload, info)
        at_random = self._method.rounding == "stochastic"
        seed = int(key.own().integers(1, _SEEDS)) if at_random else 0
        self._kernels.quantize(values, codes, scales, self._method.block, seed)
        return payload

    def add(self, payload: torch.Tensor, info: BucketInfo, total: torch.Tensor, sign: int = 1) -> None:
        """Scale by scale, code by code."""
        scales, codes = self._method.parts(payload, info)
        self._kernels.add_quantized(codes, scales, total, self._method.block, float(sign))


class DeviceOneBit(_Gathered):
    """`onebit`; see `fusion.compression.onebit`."""

    def __init__(self, method: OneBit, kernels: Compressing) -> None:
        self._method = method
        self._kernels = kernels

    def encode(self, values: torch.Tensor, info: BucketInfo, key: Key) -> torch.Tensor:
        """Scales, then signs."""
        payload = _zeros(self._method.payload_bytes(info), values)
        scales, bits = self._method.parts(payload, info)
        self._kernels.signs(values, bits, scales, self._method.block)
        return payload

    def add(self, payload: torch.Tensor, info: BucketInfo, total: torch.Tensor, sign: int = 1) -> None:
        """Plus or minus the scale."""
        scales, bits = self._method.parts(payload, info)
        self._kernels.add_signs(bits, scales, total, self._method.block, float(sign))


class DeviceTopK(_Gathered):
    """`topk`; see `fusion.compression.topk`."""

    def __init__(self, method: TopK, kernels: Compressing) -> None:
        self._method = method
        self._kernels = kernels

    def encode(self, values: torch.Tensor, info: BucketInfo, key: Key) -> torch.Tensor:
        """Values in the order of their indices, then indices, ascending."""
        self._method.check(info)
        payload = _zeros(self._method.payload_bytes(info), values)
        chosen, indices = self._method.parts(payload, info)
        self._kernels.largest(values, indices, chosen)
        return payload

    def add(self, payload: torch.Tensor, info: BucketInfo, total: torch.Tensor, sign: int = 1) -> None:
        """Values where their indices say, of which no two are the same."""
        self._method.add(payload, info, total, sign)


_BY_KERNELS: dict[type, Callable[[Any, Compressing], Reducing]] = {
    Int8: DeviceInt8,
    OneBit: DeviceOneBit,
    TopK: DeviceTopK,
}


def on_device(spec: str, kernels: Compressing, *, adds: bool) -> Reducing | None:
    """What compresses on a device by this method and settings; None if it has to be done by the host.

    Args:
        spec: of the compressor.
        kernels: of the device.
        adds: whether ranks can add values up without the host, as casts need it.
    """
    compressor = parse(spec)
    made = _BY_KERNELS.get(type(compressor))
    if made is not None:
        return made(compressor, kernels)
    return compressor if adds and isinstance(compressor, Float16 | BFloat16) else None


def _zeros(nbytes: int, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, device=like.device)
