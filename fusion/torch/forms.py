"""Makes the forms of an operation from its one description.

`x` blocking, `x_` in place, `x_async`, `x_async_`, and `grouped_` before each:
what differs between them is the same for every operation, so it is written here
once. Every form submits on the calling thread; the blocking ones wait.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from coordinator.messages import OpKind
from fusion.arrays import as_tensor
from fusion.torch import gradients
from fusion.torch.compression import NoneCompressor
from fusion.torch.process_sets import group_of
from fusion.torch.submission import Collective, Options, submit

Form = Callable[..., Any]

_RETURNS = {
    (False, True): "The result, of the same kind as `{what}`; `{what}` is not changed.",
    (True, True): "`{what}` itself, which now holds the result.",
    (False, False): "A handle for `poll` and `synchronize`, whose result is new; `{what}` is not changed.",
    (True, False): "A handle for `poll` and `synchronize`; `{what}` holds the result when it is done.",
}


def forms(collective: Collective, siblings: dict[str, Collective]) -> dict[str, Form]:
    """All forms of an operation, by name.

    Args:
        collective: the description.
        siblings: all descriptions by name, from which gradients are made.
    """
    made = {}
    for grouped in (False, True) if collective.grouped else (False,):
        for in_place in (False, True) if collective.in_place else (False,):
            for blocking in (True, False):
                form = _form(collective, siblings, in_place=in_place, grouped=grouped, blocking=blocking)
                made[form.__name__] = form
    return made


def _form(
    collective: Collective, siblings: dict[str, Collective], *, in_place: bool, grouped: bool, blocking: bool
) -> Form:
    differentiable = blocking and not in_place
    parse = collective.blocking_options if differentiable else collective.options
    what = "tensors" if grouped else "tensor"

    def form(*args: Any, **kwargs: Any) -> Any:
        tensor, *others = args or (kwargs.pop(what),)
        arrays = list(tensor) if grouped else [tensor]
        options = parse(*others, **kwargs)
        if differentiable:
            return _blocking(collective, siblings, arrays, options, grouped)
        handle = submit(collective, arrays, options, in_place=in_place, grouped=grouped, blocking=blocking)
        return handle.result() if blocking else handle

    form.__name__ = form.__qualname__ = _name(
        collective, in_place=in_place, grouped=grouped, blocking=blocking
    )
    form.__doc__ = _document(collective, what, _RETURNS[in_place, blocking].format(what=what))
    first = inspect.Parameter(what, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    others = inspect.signature(parse).parameters.values()
    form.__signature__ = inspect.Signature([first, *others])  # type: ignore[attr-defined]
    return form


def _blocking(
    collective: Collective,
    siblings: dict[str, Collective],
    arrays: Sequence[Any],
    options: Options,
    grouped: bool,
) -> Any:
    """The blocking out-of-place form: differentiable, and compressed if asked for."""
    if options.compression is not NoneCompressor:
        return _compressed(collective, siblings, arrays, options, grouped)
    if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in arrays):
        base = f"grouped_{collective.name}" if grouped else collective.name
        name = options.name or group_of(options.process_set).unnamed(base, blocking=True)
        call = gradients.Call(collective, _with(options, name=name), grouped)
        results = gradients.differentiable(call, arrays, siblings)
        result = results if grouped else results[0] if len(results) == 1 else tuple(results)
    else:
        handle = submit(collective, arrays, options, in_place=False, grouped=grouped, blocking=True)
        result = handle.result()
    if collective.kind == OpKind.ALLTOALL and options.splits is None:
        return result[0]
    return result


def _compressed(
    collective: Collective,
    siblings: dict[str, Collective],
    arrays: Sequence[Any],
    options: Options,
    grouped: bool,
) -> Any:
    name = options.name or collective.name
    taken = [as_tensor(array, name) for array in arrays]
    sent = [options.compression.compress(tensor) for tensor, _ in taken]
    plain = _with(options, compression=NoneCompressor)
    results = _blocking(collective, siblings, [tensor for tensor, _ in sent], plain, grouped)
    received = results if grouped else [results]
    outputs = []
    for tensor, (_, ctx), (_, restore) in zip(received, sent, taken, strict=True):
        output = options.compression.decompress(tensor, ctx)
        outputs.append(output if restore is None else restore(output))
    return outputs if grouped else outputs[0]


def _with(options: Options, **changes: Any) -> Options:
    fields = {field: getattr(options, field) for field in options.__struct_fields__}
    return Options(**{**fields, **changes})


def _name(collective: Collective, *, in_place: bool, grouped: bool, blocking: bool) -> str:
    return (
        ("grouped_" if grouped else "")
        + collective.name
        + ("" if blocking else "_async")
        + ("_" if in_place else "")
    )


def _document(collective: Collective, what: str, returns: str) -> str:
    which = "a list of tensors, negotiated and completed as one" if what == "tensors" else "a tensor"
    return (
        f"{collective.summary}\n\n"
        f"Args:\n    {what}: {which}; NumPy arrays and arrays with `__dlpack__` work too.\n"
        f"    The other parameters are described in the module.\n\n"
        f"Returns:\n    {returns}\n"
    )
