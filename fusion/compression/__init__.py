"""Compression of buckets: what travels between ranks in fewer bytes.

Each method is a file; `base.Compressor` says what all have in common, `feedback` keeps
what did not get across, and `registry.parse` reads "topk:0.01". How they perform:
docs/compression.md.
"""

from __future__ import annotations

from fusion.compression.base import BucketInfo, Compressor, Key, Memory, Piece, Transport
from fusion.compression.cast import BFloat16 as bf16  # noqa: N813, used like functions
from fusion.compression.cast import Float16 as fp16  # noqa: N813
from fusion.compression.cast import Uncompressed as none  # noqa: N813
from fusion.compression.feedback import Feedback, Ledger, Memories
from fusion.compression.onebit import OneBit as onebit  # noqa: N813
from fusion.compression.policy import Policy
from fusion.compression.powersgd import PowerSGD as powersgd  # noqa: N813
from fusion.compression.quantize import Int8 as int8  # noqa: N813
from fusion.compression.randomk import RandomK as randomk  # noqa: N813
from fusion.compression.registry import METHODS, parse, with_feedback
from fusion.compression.terngrad import TernGrad as terngrad  # noqa: N813
from fusion.compression.topk import TopK as topk  # noqa: N813

__all__ = [
    "METHODS",
    "BucketInfo",
    "Compressor",
    "Feedback",
    "Key",
    "Ledger",
    "Memories",
    "Memory",
    "Piece",
    "Policy",
    "Transport",
    "bf16",
    "fp16",
    "int8",
    "none",
    "onebit",
    "parse",
    "powersgd",
    "randomk",
    "terngrad",
    "topk",
    "with_feedback",
]
