"""Dtype names of the control plane and torch's dtypes: the one place that maps them.

Called on any thread. A dtype name is torch's without the prefix, and the set of
names is exactly `coordinator.messages.ITEM_SIZE`.
"""

from __future__ import annotations

import torch

from coordinator.messages import ITEM_SIZE

_BY_NAME: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_SIZE}
_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in _BY_NAME.items()}


def to_torch(name: str) -> torch.dtype:
    """The torch dtype of a dtype name, for example "bfloat16"."""
    return _BY_NAME[name]


def name_of(dtype: torch.dtype, tensor: str | None = None) -> str:
    """The name of a torch dtype.

    Args:
        dtype: the dtype to look up.
        tensor: name of the tensor it belongs to, for the error message.

    Raises:
        TypeError: the runtime cannot move tensors of this dtype.
    """
    try:
        return _NAMES[dtype]
    except KeyError:
        subject = f"tensor '{tensor}'" if tensor is not None else "a tensor"
        raise TypeError(
            f"{subject} has dtype {dtype}, which is not supported: convert it to one of "
            f"{', '.join(ITEM_SIZE)}"
        ) from None
