"""Python objects between ranks: pickled, and sent as bytes after their length.

Called on any thread by every rank alike; they wait. An object may be of any
size. What arrives is unpickled, so all ranks must trust each other, as ranks of
one job do.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from coordinator.errors import FusionError
from fusion import runtime
from fusion.torch.ops import allgather, broadcast_
from fusion.torch.process_sets import ProcessSet, global_process_set, group_of

_FAILED = -1


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Give every rank the object of `root_rank`.

    Args:
        obj: anything that can be pickled; ignored on the other ranks.
        root_rank: whose object is sent.
        name: as for `allreduce`.
        process_set: the ranks that take part.

    Returns:
        `obj` itself on `root_rank`, a copy of it elsewhere.

    Raises:
        FusionError: the object cannot be pickled; raised on every rank.
    """
    group = group_of(process_set)
    name = name if name is not None else group.unnamed("broadcast_object", blocking=True)
    root = runtime.current().topology.rank == root_rank
    payload, error = _pickle(obj) if root else (torch.empty(0, dtype=torch.uint8), None)
    length = torch.tensor([_FAILED if error else len(payload)])
    broadcast_(length, root_rank, name=f"{name}.length", process_set=process_set)
    if error is not None:
        raise FusionError(f"'{name}': the object on rank {root_rank} cannot be pickled: {error}") from error
    if length.item() == _FAILED:
        raise FusionError(f"'{name}': rank {root_rank} could not pickle its object; its own error says why")
    if not root:
        payload = torch.empty(int(length), dtype=torch.uint8)
    broadcast_(payload, root_rank, name=f"{name}.bytes", process_set=process_set)
    return obj if root else _unpickle(payload)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Give every rank the objects of all ranks, in rank order.

    Args:
        obj: anything that can be pickled; may differ in kind and size between ranks.
        name: as for `allreduce`.
        process_set: the ranks that take part.

    Raises:
        FusionError: an object cannot be pickled; raised on every rank.
    """
    group = group_of(process_set)
    name = name if name is not None else group.unnamed("allgather_object", blocking=True)
    payload, error = _pickle(obj)
    length = torch.tensor([_FAILED if error else len(payload)])
    lengths = allgather(length, name=f"{name}.length", process_set=process_set).tolist()
    if error is not None:
        raise FusionError(f"'{name}': the object on this rank cannot be pickled: {error}") from error
    failed = [rank for rank, its in zip(group.ranks, lengths, strict=True) if its == _FAILED]
    if failed:
        raise FusionError(
            f"'{name}': ranks {failed} could not pickle their objects; their own errors say why"
        )
    gathered = allgather(payload, name=f"{name}.bytes", process_set=process_set)
    return [_unpickle(part) for part in gathered.split(lengths)]


def _pickle(obj: Any) -> tuple[torch.Tensor, Exception | None]:
    """The bytes of an object, or why there are none."""
    file = io.BytesIO()
    try:
        pickle.dump(obj, file, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # noqa: BLE001, Whatever a __reduce__ raises: the other ranks are waiting for this one.
        return torch.empty(0, dtype=torch.uint8), error
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8), None


def _unpickle(payload: torch.Tensor) -> Any:
    return pickle.loads(payload.numpy().data)
