"""Sets of gradients to reduce: those of `fusion plan`."""

from __future__ import annotations

from fusion.planning.sets import MIB, SETS, Shape, describe, dtype_of, total_bytes

__all__ = ["DEFAULT_SETS", "MIB", "SETS", "Shape", "describe", "dtype_of", "total_bytes"]

DEFAULT_SETS = ("resnet50", "tiny1000", "one64mib")
