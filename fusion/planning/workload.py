"""The tensors of one training step, and when the backward pass has each of them ready.

Made by `sets.py`, `traces.py` and `models.py`; frozen, so any thread may read it.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite

import msgspec

from coordinator.errors import FusionError
from coordinator.messages import ITEM_SIZE


class PlanError(FusionError):
    """A plan cannot be made of what was given; says what to give instead."""


class Tensor(msgspec.Struct, frozen=True):
    """One gradient."""

    name: str
    count: int
    """Elements."""
    dtype: str
    ready_s: float = 0.0
    """Seconds from the beginning of the backward pass, if nothing else goes on."""

    @property
    def nbytes(self) -> int:
        return self.count * ITEM_SIZE[self.dtype]


class Workload(msgspec.Struct, frozen=True):
    """One step of one rank.

    Attributes:
        tensors: in the order in which they are ready.
        forward_s: seconds before the backward pass.
        backward_s: seconds of the backward pass; no tensor is ready later.
    """

    name: str
    tensors: tuple[Tensor, ...]
    forward_s: float = 0.0
    backward_s: float = 0.0

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def compute_s(self) -> float:
        """Seconds of the step if nothing had to be reduced."""
        return self.forward_s + self.backward_s


def make(
    name: str, tensors: Iterable[Tensor], *, forward_s: float = 0.0, backward_s: float | None = None
) -> Workload:
    """A workload, its tensors put into the order in which they are ready.

    Args:
        backward_s: by default, until the last tensor is ready.

    Raises:
        PlanError: there is no tensor, two have one name, one has an unknown dtype or
            an impossible size, or a time is not one.
    """
    found = sorted(tensors, key=lambda tensor: tensor.ready_s)
    if not found:
        raise PlanError(f"{name} has no tensors, so there is nothing to reduce and nothing to plan")
    names: set[str] = set()
    for tensor in found:
        _check(name, tensor)
        if tensor.name in names:
            raise PlanError(f"{name} has two tensors named '{tensor.name}': names tell tensors apart")
        names.add(tensor.name)
    last = found[-1].ready_s
    backward_s = last if backward_s is None else backward_s
    for what, seconds in (("forward", forward_s), ("backward", backward_s)):
        if not isfinite(seconds) or seconds < 0:
            raise PlanError(f"the {what} pass of {name} cannot take {seconds * 1e3:g} ms")
    if last > backward_s * (1 + 1e-9):
        raise PlanError(
            f"'{found[-1].name}' of {name} is ready after {last * 1e3:g} ms, later than the end of the "
            f"backward pass at {backward_s * 1e3:g} ms: give a longer one"
        )
    return Workload(name, tuple(found), forward_s, backward_s)


def spread(workload: Workload, backward_s: float) -> Workload:
    """The workload with tensors ready in proportion to the elements before them, in `backward_s` in all.

    For when only the length of the backward pass is known: a layer's work grows
    with its parameters.
    """
    total = sum(tensor.count for tensor in workload.tensors) or 1
    done = 0
    tensors = []
    for tensor in workload.tensors:
        done += tensor.count
        tensors.append(msgspec.structs.replace(tensor, ready_s=backward_s * done / total))
    return make(workload.name, tensors, forward_s=workload.forward_s, backward_s=backward_s)


def _check(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in ITEM_SIZE:
        raise PlanError(
            f"tensor '{tensor.name}' of {name} has dtype {tensor.dtype!r}, which the runtime cannot reduce: "
            f"it knows {', '.join(ITEM_SIZE)}"
        )
    if tensor.count < 0:
        raise PlanError(f"tensor '{tensor.name}' of {name} has {tensor.count} elements")
    if not isfinite(tensor.ready_s) or tensor.ready_s < 0:
        raise PlanError(
            f"tensor '{tensor.name}' of {name} is ready at {tensor.ready_s} s: times are seconds from the "
            "beginning of the backward pass"
        )
