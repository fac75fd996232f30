"""Workloads from torch modules: `package.module:factory`.

The factory takes no argument and returns a module, or a tuple of a module, its
example input (a tensor, a tuple of arguments or a dict of keywords) and, if need be, a
function from its output to the loss. With an input, forward and backward are run and
timed; on the meta device, where nothing can be timed, the share of the backward
pass before each gradient is that of the floating-point operations. Without an input,
gradients come in reverse order of the parameters, spread by their sizes over the
backward pass that was given.

Runs on the main thread of a rank (`ranks.py`), on all ranks at once, so that ranks
which share cores are timed as they will run.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from coordinator.messages import ITEM_SIZE
from fusion.planning.workload import PlanError, Tensor, Workload, make, spread

_WARM_UP = 2
_LEAST_RUNS = 3
_MOST_RUNS = 15


class Model(NamedTuple):
    """What a factory returned."""

    path: str
    module: nn.Module
    inputs: Any = None
    loss: Callable[[Any], torch.Tensor] | None = None

    @property
    def on_meta(self) -> bool:
        return any(parameter.is_meta for parameter in self.module.parameters())


class Profile(NamedTuple):
    """Seconds of one rank, which others may correct before `workload` is made of them."""

    forward_s: float
    backward_s: float
    ready_s: dict[str, float]


def load(path: str) -> Model:
    """Import a module and call its factory.

    Raises:
        PlanError: there is no such module or factory, the factory fails, or what it
            returns is no module with trainable parameters.
    """
    module_name, _, factory_name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        home = importlib.import_module(module_name)
    except ImportError as error:
        raise PlanError(f"{path}: the module {module_name!r} cannot be imported: {error}") from error
    factory = getattr(home, factory_name, None)
    if not callable(factory):
        raise PlanError(f"{path}: {module_name} has no function {factory_name!r}")
    try:
        made = factory()
    except Exception as error:
        raise PlanError(f"{path}: {factory_name}() failed: {type(error).__name__}: {error}") from error
    model = Model(path, *made) if isinstance(made, tuple) and 1 <= len(made) <= 3 else Model(path, made)
    if not isinstance(model.module, nn.Module):
        raise PlanError(
            f"{path}: {factory_name}() must return a torch.nn.Module, or a tuple of one, its example input "
            f"and, if need be, a loss function; it returned {type(model.module).__name__}"
        )
    if not any(parameter.requires_grad for parameter in model.module.parameters()):
        raise PlanError(f"{path}: the module has no trainable parameters, so there is nothing to reduce")
    return model


def profile(model: Model, seconds: float = 2.0) -> Profile:
    """Run the model for about `seconds` and take the medians; on meta, count operations in place of seconds.

    Raises:
        PlanError: the model cannot be run, or a parameter gets no gradient.
    """
    try:
        if model.on_meta:
            return _counted(model)
        start = time.perf_counter()
        runs = [_timed(model) for _ in range(_WARM_UP)]
        each = (time.perf_counter() - start) / _WARM_UP
        wanted = max(_LEAST_RUNS, min(_MOST_RUNS, int(seconds / max(each, 1e-9))))
        runs = [_timed(model) for _ in range(wanted)]
    except PlanError:
        raise
    except Exception as error:
        raise PlanError(f"{model.path}: one step with the example input failed: {error}") from error
    ready = {name: median(run.ready_s[name] for run in runs) for name in runs[-1].ready_s}
    return Profile(median(run.forward_s for run in runs), median(run.backward_s for run in runs), ready)


def backward_only(model: Model) -> Callable[[], object]:
    """A call that runs the model's backward pass again and again, and touches no gradient."""
    loss = loss_of(model)
    parameters = [parameter for _, parameter in _trainable(model.module)]
    return lambda: torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)


def workload(
    model: Model,
    profiled: Profile | None,
    *,
    forward_s: float | None = None,
    backward_s: float | None = None,
) -> Workload:
    """The step of a model.

    Args:
        profiled: what was measured, None for a model without input.
        forward_s, backward_s: to use in place of what was measured.

    Raises:
        PlanError: a model on the meta device, and no `backward_s`.
    """
    if profiled is None or (model.on_meta and backward_s is None):
        if model.on_meta and profiled is not None:
            raise PlanError(
                f"{model.path}: a backward pass on the meta device takes no time: give --backward-ms"
            )
        named = reversed(list(_trainable(model.module)))
        plain = make(
            model.path,
            [_tensor(name, parameter, 0.0) for name, parameter in named],
            forward_s=forward_s or 0.0,
        )
        return spread(plain, backward_s or 0.0)
    scale = 1.0
    if backward_s is not None:
        scale = backward_s / profiled.backward_s if profiled.backward_s else 0.0
    parameters = dict(_trainable(model.module))
    tensors = [
        _tensor(
            name,
            parameters[name],
            min(ready * scale, profiled.backward_s if backward_s is None else backward_s),
        )
        for name, ready in profiled.ready_s.items()
    ]
    measured_forward = 0.0 if model.on_meta else profiled.forward_s
    return make(
        model.path,
        tensors,
        forward_s=measured_forward if forward_s is None else forward_s,
        backward_s=profiled.backward_s if backward_s is None else backward_s,
    )


def _trainable(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]


def _tensor(name: str, parameter: nn.Parameter, ready_s: float) -> Tensor:
    values = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter
    dtype = str(values.dtype).removeprefix("torch.")
    if dtype not in ITEM_SIZE:
        raise PlanError(f"parameter '{name}' has dtype {parameter.dtype}, which the runtime cannot reduce")
    return Tensor(name, values.numel(), dtype, ready_s)


def _timed(model: Model) -> Profile:
    return _run(model, time.perf_counter)


def _counted(model: Model) -> Profile:
    """A step in floating-point operations, scaled to a backward pass of one second."""
    with FlopCounterMode(display=False) as counter:
        run = _run(model, lambda: float(counter.get_total_flops()))
    total = run.backward_s or 1.0
    return Profile(0.0, 1.0, {name: at / total for name, at in run.ready_s.items()})


def _run(model: Model, clock: Callable[[], float]) -> Profile:
    """One step, with what the clock says when each gradient is complete."""
    model.module.zero_grad(set_to_none=True)
    at: dict[str, float] = {}

    def noting(name: str) -> Callable[[torch.Tensor], None]:
        def note(_: torch.Tensor) -> None:
            at[name] = clock()

        return note

    hooks = [
        parameter.register_post_accumulate_grad_hook(noting(name))
        for name, parameter in _trainable(model.module)
    ]
    try:
        begun = clock()
        loss = loss_of(model)
        forward = clock()
        loss.backward()
        end = clock()
    finally:
        for hook in hooks:
            hook.remove()
    missing = [name for name, _ in _trainable(model.module) if name not in at]
    for name in missing:  # The runtime adds zeros for them when the pass is over.
        at[name] = end
    if len(missing) == len(at):
        raise PlanError(f"{model.path}: no parameter got a gradient from the example input")
    return Profile(forward - begun, end - forward, {name: moment - forward for name, moment in at.items()})


def loss_of(model: Model) -> torch.Tensor:
    inputs = model.inputs
    if isinstance(inputs, Mapping):
        output = model.module(**inputs)
    else:
        output = model.module(*inputs) if isinstance(inputs, (tuple, list)) else model.module(inputs)
    if model.loss is not None:
        return model.loss(output)
    floats = [tensor for tensor in _tensors(output) if tensor.is_floating_point() and tensor.requires_grad]
    if not floats:
        raise PlanError(
            f"{model.path}: the output holds no tensor to make a loss of: let the factory return a loss "
            "function as well"
        )
    return torch.stack([tensor.float().square().mean() for tensor in floats]).sum()


def _tensors(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, Mapping):
        return [tensor for value in output.values() for tensor in _tensors(value)]
    if isinstance(output, (tuple, list)):
        return [tensor for value in output for tensor in _tensors(value)]
    return []
