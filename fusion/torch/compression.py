"""Casting of values to a narrower type for the way between ranks.

A compressor is a class with `compress` and `decompress`; anything of that shape
can be passed as `compression`. Called on the thread that submits. Only values
cross in the narrow type: the runtime sums 16-bit floats in float32.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from fusion.compression.onebit import OneBit
from fusion.compression.powersgd import PowerSGD
from fusion.compression.quantize import Int8
from fusion.compression.randomk import RandomK
from fusion.compression.terngrad import TernGrad
from fusion.compression.topk import TopK


class Compressor(Protocol):
    """What `compression=` takes."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor to send, and what `decompress` needs to know."""
        ...

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor in its first form."""
        ...


class NoneCompressor:
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:  # noqa: ARG004, compressors share a shape
        """The tensor itself."""
        return tensor


class _CastCompressor:
    """Sends floating-point tensors as `wire`, other tensors as they are."""

    wire: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor cast to the wire type, and the type it had."""
        sent = tensor.to(cls.wire) if tensor.dtype.is_floating_point else tensor
        return sent, tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor cast back."""
        return tensor.to(ctx)


class FP16Compressor(_CastCompressor):
    """Sends floating-point tensors as float16."""

    wire = torch.float16


class BF16Compressor(_CastCompressor):
    """Sends floating-point tensors as bfloat16: less precise than float16, but with float32's range."""

    wire = torch.bfloat16


class Compression:
    """The compressors by name.

    The first three cast single tensors, as in Horovod. The others compress buckets, and are made with
    their settings, such as `Compression.topk(0.01)`; see `fusion.compression`.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Int8
    onebit = OneBit
    terngrad = TernGrad
    topk = TopK
    randomk = RandomK
    powersgd = PowerSGD
