"""Gradients that the user put into one group are negotiated and reduced as one request."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from coordinator.handle import Handle
from fusion.dtypes import name_of
from fusion.torch.carrier import Wire
from fusion.torch.dynamic import Dynamic
from fusion.torch.slots import Parcel, Slot
from fusion.torch.submission import kind_of


class Grouped:
    """The carrier of `groups=`; a gradient that is in no group goes by itself.

    Args:
        scope: first part of all names, unique to the optimizer.
        wire: what is done to gradients on their way.
        dynamic: for gradients outside of the groups.
        groups: slots that belong together.
    """

    def __init__(self, scope: str, wire: Wire, dynamic: Dynamic, groups: Sequence[Sequence[Slot]]) -> None:
        self._dynamic = dynamic
        self._groups = [_Group(f"{scope}group{n}", wire, slots) for n, slots in enumerate(groups) if slots]
        self._group_of = {slot.index: group for group in self._groups for slot in group.slots}

    def send(self, slot: Slot, grad: torch.Tensor, nth: int) -> Parcel:
        """Submit the group of the gradient if this was the last one missing."""
        group = self._group_of.get(slot.index)
        if nth or group is None:
            return self._dynamic.send(slot, grad, nth)
        return group.add(slot, grad)

    def fill(self, slot: Slot, nth: int) -> Parcel:
        """The result, for a slot that was sent as zeros with its group."""
        group = self._group_of.get(slot.index)
        if nth or group is None:
            return self._dynamic.fill(slot, nth)
        return group.parcel(slot)

    def close(self, slots: Sequence[Slot], votes: list[float]) -> list[float]:
        """Submit the groups that are not complete with zeros for what they lack."""
        for group in self._groups:
            group.complete()
        agreed = self._dynamic.close(slots, votes)
        for group in self._groups:
            group.wait()
        return agreed


class _Group:
    """Some slots and, during a window, what travels for each."""

    def __init__(self, name: str, wire: Wire, slots: Sequence[Slot]) -> None:
        self.slots = tuple(slots)
        self._name = name
        self._wire = wire
        self._grads: dict[int, torch.Tensor] = {}
        self._results: dict[int, torch.Tensor] = {}
        self._handle: Handle | None = None

    def add(self, slot: Slot, grad: torch.Tensor) -> Parcel:
        self._grads[slot.index] = grad
        if len(self._grads) == len(self.slots):
            self._submit()
        return Parcel(grad, lambda: self._results[slot.index])

    def parcel(self, slot: Slot) -> Parcel:
        result = self._results[slot.index]
        return Parcel(result, lambda: result)

    def complete(self) -> None:
        if self._handle is None:
            for slot in self.slots:
                if slot.index not in self._grads:
                    self._grads[slot.index] = torch.zeros_like(slot.parameter, requires_grad=False)
            self._submit()

    def wait(self) -> None:
        """Keep the results until the next window is closed."""
        handle, self._handle = self._handle, None
        grads, self._grads = self._grads, {}
        assert handle is not None
        self._results = {}
        values = handle.result()
        for slot, value in zip(self.slots, values, strict=True):
            grad = grads[slot.index]
            reduced = self._wire.compression.decompress(value, self._contexts[slot.index])
            if grad.is_complex():
                reduced = torch.view_as_complex(reduced)
            if not grad.requires_grad:
                grad.data.copy_(reduced)
            self._results[slot.index] = reduced if grad.requires_grad else grad

    def _submit(self) -> None:
        sent = []
        self._contexts = {}
        for slot in self.slots:
            grad = self._grads[slot.index].detach()
            values = torch.view_as_real(grad) if grad.is_complex() else grad
            value, self._contexts[slot.index] = self._wire.compression.compress(values)
            sent.append(value)
        request = self._wire.request(
            self._name,
            tuple(name_of(value.dtype, self._name) for value in sent),
            tuple(tuple(value.shape) for value in sent),
            device=kind_of(sent, self._name),
        )
        outputs: list[torch.Tensor | None] = [torch.empty_like(value) for value in sent]
        self._handle = self._wire.group.submit(request, sent, outputs, unpack=list)


def split(slots: Sequence[Slot], groups: int | Sequence[Sequence[torch.Tensor]]) -> list[list[Slot]]:
    """The groups a user asked for: a number of equal runs, or lists of parameters.

    Raises:
        ValueError: the number is negative, or a parameter is not the optimizer's or is in two groups.
    """
    if isinstance(groups, int):
        if groups < 0:
            raise ValueError(f"groups must be a number from 0 on or lists of parameters, not {groups}")
        if groups == 0:
            return []
        short, longer = divmod(len(slots), groups)
        starts = [n * short + min(n, longer) for n in range(groups + 1)]
        return [list(slots[start:stop]) for start, stop in pairwise(starts)]
    left = {id(slot.parameter): slot for slot in slots}
    made = []
    for group in groups:
        try:
            made.append([left.pop(id(parameter)) for parameter in group])
        except KeyError:
            raise ValueError(
                "groups names a parameter that is in two groups, or that the optimizer does not train"
            ) from None
    return made
