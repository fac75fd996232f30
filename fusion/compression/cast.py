"""The methods that change no more than the width of a number: `none`, `fp16`, `bf16`.

`fusion.torch.Compression.fp16` does the same to single tensors, the way Horovod does;
these work on buckets, and can remember what rounding took away.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from fusion.compression.base import (
    BucketInfo,
    Compressor,
    Key,
    Memory,
    Transport,
    padded,
    parts_of,
    payload_of,
)


class _Cast(Compressor, frozen=True):
    """A bucket in another dtype. Cost: one pass over the bucket each way."""

    linear: ClassVar[bool] = True
    dtype: ClassVar[torch.dtype]

    def payload_bytes(self, info: BucketInfo) -> int:
        """The elements in the narrow dtype."""
        return padded(info.count * self.dtype.itemsize)

    def encode(
        self, values: torch.Tensor, info: BucketInfo, key: Key, memories: Sequence[Memory] | None = None
    ) -> torch.Tensor:
        """The elements, cast."""
        narrow = values.to(self.dtype, copy=True)
        return payload_of(narrow)

    def decode(self, payload: torch.Tensor, info: BucketInfo) -> torch.Tensor:
        """The elements, cast back."""
        (narrow,) = parts_of(payload, (self.dtype, info.count))
        return narrow.to(torch.float32, copy=True)

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
        """See `Compressor.reduce`: one all-reduce in the narrow dtype."""
        narrow = values.to(self.dtype)
        mean = transport.mean(narrow)
        if keep:
            values.sub_(narrow.to(torch.float32))
        return mean.to(torch.float32)


class Uncompressed(_Cast, frozen=True):
    """`none`: the bucket as it is, 1×."""

    name: ClassVar[str] = "none"
    paper: ClassVar[str] = "-"
    unbiased: ClassVar[bool] = True
    dtype: ClassVar[torch.dtype] = torch.float32


class Float16(_Cast, frozen=True):
    """`fp16`: 2×; values beyond 65504 overflow to infinity."""

    name: ClassVar[str] = "fp16"
    paper: ClassVar[str] = "Micikevicius et al. 2018, Mixed precision training, arXiv:1710.03740"
    dtype: ClassVar[torch.dtype] = torch.float16

    feedback: bool = False


class BFloat16(_Cast, frozen=True):
    """`bf16`: 2×; three digits fewer than float32, but its range."""

    name: ClassVar[str] = "bf16"
    paper: ClassVar[str] = "Kalamkar et al. 2019, A study of bfloat16 for deep learning, arXiv:1905.12322"
    dtype: ClassVar[torch.dtype] = torch.bfloat16

    feedback: bool = False
