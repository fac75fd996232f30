"""Give every rank the parameters or the optimizer state of one rank.

Called by every rank alike; they wait. Values travel as they lie in memory; only
what is no tensor is pickled, and it is small.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import torch

from fusion import runtime
from fusion.torch.objects import broadcast_object
from fusion.torch.ops import broadcast_async_
from fusion.torch.process_sets import ProcessSet, global_process_set, group_of

_SMALL = 4096
"""Tensors of fewer bytes travel with the header: a step counter is not worth a request."""


def broadcast_parameters(params: Any, root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Overwrite tensors by those of `root_rank`, in place.

    Args:
        params: `model.state_dict()`, `model.named_parameters()`, `model.parameters()`, or
            any mapping or iterable of tensors or (name, tensor) pairs. Entries that
            are no tensors are left as they are: send those by `broadcast_object`.
        root_rank: whose values are sent.
        process_set: the ranks that take part.

    Raises:
        ValueError: `params` is none of these, or a name comes twice.
    """
    scope = group_of(process_set).unnamed("broadcast_parameters", blocking=False)
    handles = []
    for name, tensor in _named(params):
        values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor
        handles.append(broadcast_async_(values, root_rank, name=f"{scope}.{name}", process_set=process_set))
    for handle in handles:
        handle.result()


def _named(params: Any) -> list[tuple[str, torch.Tensor]]:
    if isinstance(params, Mapping):
        params = list(params.items())
    elif isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise ValueError(  # noqa: TRY004, what Horovod raises
            f"expected a mapping or an iterable of tensors, got {type(params).__name__}"
        )
    named = []
    for position, item in enumerate(params):
        name, value = item if isinstance(item, tuple) else (str(position), item)
        if isinstance(value, torch.Tensor):
            named.append((str(name), value))
    if len({name for name, _ in named}) < len(named):
        raise ValueError("params has a name more than once: give each model a prefix, or call once for each")
    return named


class _Placeholder(msgspec.Struct, frozen=True):
    """Stands in the header for a tensor that is sent by itself."""

    index: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    parameter: bool
    """It was an nn.Parameter."""
    device: str
    """The kind of device it is on; every rank has its own."""


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: torch.nn.Module | None = None,  # noqa: ARG001 - Horovod's parameter
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give every rank the optimizer state of `root_rank`: options of the groups and state of the parameters.

    The state of `root_rank` is only read, and no rank takes a step. Other ranks end
    with equal values of the same types, whatever state they had.

    Args:
        optimizer: a torch optimizer or `DistributedOptimizer`, over the same
            parameters in the same order on every rank.
        root_rank: whose state is sent.
        model: not needed; for scripts that pass it.
        process_set: the ranks that take part.

    Raises:
        ValueError: this rank's optimizer has other groups than that of `root_rank`.
    """
    scope = group_of(process_set).unnamed("broadcast_optimizer_state", blocking=False)
    root = runtime.current().topology.rank == root_rank
    tensors: list[torch.Tensor] = []
    header = _pack(_shared_state(optimizer), tensors) if root else None
    header = broadcast_object(header, root_rank, name=f"{scope}.header", process_set=process_set)
    if not root:
        tensors = [_empty(placeholder) for placeholder in _placeholders(header)]
    handles = [
        broadcast_async_(tensor.detach(), root_rank, name=f"{scope}.{index}", process_set=process_set)
        for index, tensor in enumerate(tensors)
    ]
    for handle in handles:
        handle.result()
    if not root:
        _load(optimizer, _unpack(header, tensors))


def _shared_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state without the residuals of compression, which are each rank's own."""
    state = optimizer.state_dict()
    compression = state.pop("compression", None)
    return state if compression is None else {**state, "compression_steps": compression["steps"]}


def _pack(value: Any, tensors: list[torch.Tensor]) -> Any:
    """A copy of nested containers with large tensors moved to `tensors`."""
    if isinstance(value, torch.Tensor):
        real = torch.view_as_real(value.detach()) if value.is_complex() else value.detach()
        if value.layout != torch.strided or value.is_complex() or (value.is_cpu and value.nbytes < _SMALL):
            return value.detach().cpu().clone()
        tensors.append(real)
        dtype = str(value.dtype).removeprefix("torch.")
        stride = torch.empty_like(value, device="meta").stride()
        is_parameter = isinstance(value, torch.nn.Parameter)
        shape, kind = tuple(value.shape), value.device.type
        return _Placeholder(len(tensors) - 1, dtype, shape, stride, is_parameter, kind)
    return _map(value, lambda item: _pack(item, tensors))


def _unpack(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The containers with their tensors back in place."""
    if isinstance(value, _Placeholder):
        return tensors[value.index]
    return _map(value, lambda item: _unpack(item, tensors))


def _placeholders(value: Any) -> list[_Placeholder]:
    found: list[_Placeholder] = []

    def visit(item: Any) -> Any:
        if isinstance(item, _Placeholder):
            found.append(item)
            return item
        return _map(item, visit)

    visit(value)
    return sorted(found, key=lambda placeholder: placeholder.index)


def _map(value: Any, change: Any) -> Any:
    """Containers of the same type with `change` applied to what is in them; anything else as it is."""
    if isinstance(value, dict):
        copy = type(value)() if type(value) is not dict else {}
        copy.update({key: change(item) for key, item in value.items()})
        return copy
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(change, value))
    if type(value) in (list, tuple):
        return type(value)(change(item) for item in value)
    return value


def _empty(placeholder: _Placeholder) -> torch.Tensor:
    dtype = getattr(torch, placeholder.dtype)
    tensor = torch.empty_strided(
        placeholder.shape, placeholder.stride, dtype=dtype, device=placeholder.device
    )
    return torch.nn.Parameter(tensor, requires_grad=False) if placeholder.parameter else tensor


def _load(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Put a state in place exactly; `load_state_dict` would cast it to the parameters' dtype."""
    groups = optimizer.param_groups
    sizes = [len(group["params"]) for group in groups]
    wanted = [len(group["params"]) for group in state["param_groups"]]
    if sizes != wanted:
        raise ValueError(
            f"this rank's optimizer has groups of {sizes} parameters, but the one sent has {wanted}: "
            "build it the same way on every rank"
        )
    by_number: dict[Any, torch.Tensor] = {}
    for group, sent in zip(groups, state["param_groups"], strict=True):
        by_number.update(zip(sent["params"], group["params"], strict=True))
        for key in set(group) - set(sent):
            del group[key]
        group.update({key: value for key, value in sent.items() if key != "params"})
    compressing = getattr(optimizer, "_compressing", None)
    if compressing is not None and "compression_steps" in state:
        compressing.steps = state["compression_steps"]
    optimizer.state.clear()
    for key, value in state["state"].items():
        optimizer.state[by_number.get(key, key)] = value
