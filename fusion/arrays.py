"""Arrays of other libraries as torch tensors, and results back in the kind that came in.

Nothing is copied: NumPy arrays and arrays that speak DLPack share their memory
with the tensor, so an in-place operation writes the caller's array. Called on
the thread that submits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.utils.dlpack

Restore = Callable[[torch.Tensor], Any]
"""Turns a result into the kind of array that was passed in."""


def as_tensor(array: Any, name: str, *, writable: bool = False) -> tuple[torch.Tensor, Restore | None]:
    """A tensor over the memory of `array`, and how to give a result back.

    Args:
        array: a torch tensor, a NumPy array or scalar, or anything with `__dlpack__`.
        name: of the operation, for error messages.
        writable: the tensor will be written.

    Returns:
        The tensor, and None for a torch tensor or else the way back.

    Raises:
        TypeError: this is no array, or one of a dtype torch does not have.
        ValueError: it must be written and cannot be.
    """
    if isinstance(array, torch.Tensor):
        return array, None
    if isinstance(array, (np.ndarray, np.generic)):
        return _from_numpy(array, name, writable), torch.Tensor.numpy
    if hasattr(array, "__dlpack__"):
        return torch.utils.dlpack.from_dlpack(array), _way_back(array, name)
    raise TypeError(
        f"'{name}': expected a torch tensor, a NumPy array or an array with __dlpack__, "
        f"got {type(array).__name__}"
    )


def _from_numpy(array: np.ndarray[Any, Any] | np.generic, name: str, writable: bool) -> torch.Tensor:
    source = np.asarray(array)
    if writable and (not isinstance(array, np.ndarray) or not source.flags.writeable):
        raise ValueError(f"'{name}' is read-only, so it cannot be reduced in place: pass a copy")
    if any(stride < 0 for stride in source.strides):
        if writable:
            raise ValueError(f"'{name}' has negative strides, which torch cannot write: pass a copy")
        source = source.copy()
    if not source.flags.writeable:
        source = source.copy()
    try:
        return torch.from_numpy(source)
    except TypeError as error:
        raise TypeError(f"'{name}' has dtype {source.dtype}, which torch does not have") from error


def _way_back(array: Any, name: str) -> Restore:
    """`from_dlpack` of the library that made the array."""
    library = sys.modules.get(type(array).__module__.partition(".")[0])
    back: Restore | None = getattr(library, "from_dlpack", None)
    if back is None and hasattr(array, "__array_namespace__"):
        back = getattr(array.__array_namespace__(), "from_dlpack", None)
    if back is None:
        raise TypeError(
            f"'{name}': {type(array).__name__} can be read by DLPack, but its library offers no "
            "from_dlpack for the result: pass torch.from_dlpack(array)"
        )
    return back
