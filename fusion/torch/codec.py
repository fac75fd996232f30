"""From what a caller passed as `compression=` of an operation to the codec of a request.

There are two kinds of compression. Horovod's casts a tensor before it is submitted
(`fusion.torch.compression`). The methods of `fusion.compression` work on the bucket while it is
executed; they are what a `Codec` is about. Called on the thread that submits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from coordinator.messages import OpKind, ReduceOp
from fusion.compression.base import FLOATS, BucketInfo, Compressor
from fusion.compression.cast import BFloat16, Float16, Uncompressed
from fusion.compression.feedback import Feedback, Ledger
from fusion.compression.registry import parse, with_feedback
from fusion.dtypes import name_of
from fusion.torch.compression import BF16Compressor, FP16Compressor, NoneCompressor


class Codec(msgspec.Struct, frozen=True):
    """How an operation compresses.

    Attributes:
        compressor: the method, or None for none.
        feedback: its memory, or None.
    """

    compressor: Compressor | None = None
    feedback: Feedback | None = None

    @property
    def spec(self) -> str:
        """What ranks compare."""
        return "none" if self.compressor is None else self.compressor.spec


NO_CODEC = Codec()


def codec_of(compression: Any) -> Codec | None:
    """The codec that a caller asked for; None if it is of Horovod's kind.

    Without a `Feedback` nothing is remembered from one call to the next, so error feedback is off.

    Raises:
        ValueError: there is no such method.
    """
    if isinstance(compression, Feedback):
        return Codec(compression.compressor, compression)
    compression = method_of(compression)
    if not isinstance(compression, Compressor):
        return None
    if isinstance(compression, Uncompressed):
        return NO_CODEC
    return Codec(with_feedback(compression, False))


def method_of(compression: Any) -> Any:
    """The compressor of a specification, or of a method that was passed without its settings; else the same.

    Raises:
        ValueError: there is no such method, or it needs a setting.
    """
    if isinstance(compression, type) and issubclass(compression, Compressor):
        compression = compression.name
    return parse(compression) if isinstance(compression, str) else compression


def codec_for(compression: Any) -> Codec:
    """The same for operations that cast nothing before they submit.

    Raises:
        TypeError: it is a compressor of Horovod's kind other than those of `Compression`.
    """
    alike: dict[Any, Codec] = {
        NoneCompressor: NO_CODEC,
        FP16Compressor: Codec(Float16()),
        BF16Compressor: Codec(BFloat16()),
    }
    codec = alike.get(compression) if isinstance(compression, type) else None
    codec = codec or codec_of(compression)
    if codec is None:
        raise TypeError(
            f"compression={compression!r} cannot be used here: pass a method of fusion.compression, a "
            "specification such as 'topk:0.01', or a fusion.compression.Feedback; only the waiting "
            "out-of-place forms take a class with compress and decompress of its own"
        )
    return codec


def check_codec(codec: Codec, kind: OpKind, op: ReduceOp, tensors: Sequence[torch.Tensor], name: str) -> None:
    """Refuse what cannot be compressed.

    Raises:
        TypeError: a tensor is not of floats.
        ValueError: the operation does not add up.
    """
    if kind != OpKind.ALLREDUCE or op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        what = op.name.lower() if kind == OpKind.ALLREDUCE else kind.name.lower()
        raise ValueError(
            f"'{name}': {codec.spec} can be used with an all-reduce by Sum or Average, not with {what}: "
            "leave compression out"
        )
    for tensor in tensors:
        if name_of(tensor.dtype, name) not in FLOATS:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise TypeError(
                f"'{name}' is of dtype {dtype}, but {codec.spec} compresses floats: leave compression out, "
                "or convert it"
            )


def ledgers(
    tensors: Sequence[torch.Tensor], codec: Codec, given: str | None, name: str
) -> dict[str, Ledger] | None:
    """What is remembered of the tensors of one call, by dtype: those of one dtype are a bucket.

    Raises:
        ValueError: there is a memory, but no name to find the tensor by the next time.
    """
    if codec.feedback is None:
        return None
    if given is None:
        raise ValueError(f"'{name}': error feedback needs name=, to know the tensor by the next time")
    parts: dict[str, list[tuple[str, Sequence[int]]]] = {}
    for index, tensor in enumerate(tensors):
        key = name if len(tensors) == 1 else f"{name}.{index}"
        parts.setdefault(name_of(tensor.dtype), []).append((key, tensor.shape))
    return {dtype: codec.feedback.open(BucketInfo.of(part)) for dtype, part in parts.items()}
