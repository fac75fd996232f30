"""Gradients travel in fixed buckets, each compressed as a whole.

Parameters that get the same compressor and have the same dtype are laid out in buckets, in reverse
order of the model at first, and once more after the first step in the order in which gradients
really arrived on rank 0. A bucket leaves when all of its gradients are there. So what a compressor
sees is the same in every run, and results have the same bits. Parameters that no compressor is for,
and a second gradient of a parameter in one window, travel as without compression.

Used on the threads that train. What did not get across counts as soon as the window is closed
and its gradients are wanted on every rank; if they are thrown away, or are not finite, what is
remembered stays as it was, and so it does for a parameter that no rank used.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from coordinator.handle import Handle, wait_all
from coordinator.messages import ITEM_SIZE, Request
from fusion.compression.base import BucketInfo, Compressor
from fusion.compression.cast import Uncompressed
from fusion.compression.feedback import Flag, Ledger, all_of
from fusion.dtypes import name_of
from fusion.torch.carrier import FLAGS, Wire
from fusion.torch.compressing import Compressing
from fusion.torch.dynamic import Dynamic
from fusion.torch.objects import broadcast_object
from fusion.torch.slots import Parcel, Slot

if TYPE_CHECKING:
    from fusion.cuda.device import Mark


class Compressed:
    """The carrier of gradients that `fusion.compression` compresses.

    Args:
        scope: first part of all names, unique to the optimizer.
        wire: what is done to gradients on their way.
        dynamic: for gradients that are not compressed.
        slots: the parameters present.
        compressing: how, and what is remembered.
        threshold: bytes of a bucket before it is compressed.
    """

    def __init__(
        self,
        scope: str,
        wire: Wire,
        dynamic: Dynamic,
        slots: Sequence[Slot],
        *,
        compressing: Compressing,
        threshold: int,
    ) -> None:
        self._scope = scope
        self._wire = wire
        self._dynamic = dynamic
        self._compressing = compressing
        self._threshold = threshold
        self._slots = {slot.index: slot for slot in slots if slot.parameter.requires_grad}
        self._generation = 0
        self._arrived: list[int] | None = []
        self._order = list(reversed(self._slots))
        self._lay_out()

    def send(self, slot: Slot, grad: torch.Tensor, nth: int) -> Parcel:
        """Put the gradient into its bucket, and submit that if this was the last one missing."""
        bucket = self._bucket_of.get(slot.index)
        if nth or bucket is None:
            return self._dynamic.send(slot, grad, nth)
        if self._arrived is not None:
            self._arrived.append(slot.index)
        return bucket.add(slot, grad)

    def fill(self, slot: Slot, nth: int) -> Parcel:
        """The result, for a slot that was sent as zeros with its bucket."""
        bucket = self._bucket_of.get(slot.index)
        if nth or bucket is None:
            return self._dynamic.fill(slot, nth)
        return bucket.parcel(slot)

    def close(self, slots: Sequence[Slot], votes: list[float]) -> list[float]:
        """Send zeros for what is missing, wait for everything, and decide what is remembered."""
        try:
            for bucket in self._buckets:
                bucket.complete()
            agreed = self._dynamic.close(slots, votes)
        finally:
            flights = [bucket.landed() for bucket in self._buckets]
        wait_all([flight.handle for flight in flights if flight.handle is not None])
        for bucket, flight in zip(self._buckets, flights, strict=True):
            bucket.take(flight)
        used = {slot.index for slot, vote in zip(slots, agreed, strict=False) if vote > 0}
        keeping, dropping = (vote > 0 for vote in agreed[-FLAGS : -FLAGS + 2])
        wanted = used if keeping and not dropping else None
        arrived = all_of(bucket.arrived for bucket in self._buckets)
        for bucket in self._buckets:
            bucket.settle(wanted, arrived)
        if keeping:
            self._compressing.steps += 1
        return agreed

    def reorder(self) -> None:
        """After the first window: lay the buckets out in the order of arrival. Collective."""
        if self._arrived is None or not self._buckets:
            return
        group, scope = self._wire.group, self._scope
        order = broadcast_object(self._arrived, group.ranks[0], f"{scope}order", self._wire.process_set)
        self._arrived = None if order else []
        order = list(dict.fromkeys([*order, *self._order]))
        if order != self._order:
            self._order = order
            self._generation += 1
            self._lay_out()

    def _lay_out(self) -> None:
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, _Bucket] = {}
        for compressor, slots in _split(
            [self._slots[index] for index in self._order], self._compressing, self._threshold
        ):
            name = f"{self._scope}compressed{len(self._buckets)}.{self._generation}"
            bucket = _Bucket(name, self._wire, slots, compressor, self._compressing)
            self._buckets.append(bucket)
            self._bucket_of.update((slot.index, bucket) for slot in slots)


class _Flight:
    """What is sent for a bucket in one window."""

    def __init__(self) -> None:
        self.grads: dict[int, torch.Tensor] = {}
        self.ready: list[Mark] = []
        """When the gradients on a device may be read."""
        self.handle: Handle | None = None


class _Bucket:
    """Some slots and, during a window, what travels for each."""

    def __init__(
        self,
        name: str,
        wire: Wire,
        slots: Sequence[Slot],
        compressor: Compressor,
        compressing: Compressing,
    ) -> None:
        self._slots = tuple(slots)
        self._wire = wire
        self._compressing = compressing
        shapes = tuple(real_shape(slot.parameter) for slot in slots)
        dtype = name_of(real_dtype(slots[0].parameter))
        info = BucketInfo.of((slot.name, shape) for slot, shape in zip(slots, shapes, strict=True))
        self._ledger = compressing.open(info, compressor) if compressor.remembers else None
        self._extra: dict[str, Ledger] | None = None if self._ledger is None else {dtype: self._ledger}
        self._device = slots[0].parameter.device.type
        self._requests: dict[bool, Request] = {
            warm: wire.request(name, (dtype,) * len(shapes), shapes, device=self._device, codec=codec)
            for warm, codec in ((True, "none"), (False, compressor.spec))
        }
        self._results: dict[int, torch.Tensor] = {}
        self._flight = _Flight()

    @property
    def arrived(self) -> Flag:
        """Whether the result was finite."""
        return self._ledger is None or self._ledger.arrived

    def add(self, slot: Slot, grad: torch.Tensor) -> Parcel:
        self._flight.grads[slot.index] = grad
        if self._device != "cpu":
            self._flight.ready += self._wire.group.devices.mark([grad], slot.name)
        if len(self._flight.grads) == len(self._slots):
            self._submit()
        return Parcel(grad, lambda: self._results[slot.index])

    def parcel(self, slot: Slot) -> Parcel:
        result = self._results[slot.index]
        return Parcel(result, lambda: result)

    def complete(self) -> None:
        """Submit, if that has not happened yet, with zeros for what is missing."""
        if self._flight.handle is None:
            for slot in self._slots:
                if slot.index not in self._flight.grads:
                    self._flight.grads[slot.index] = torch.zeros_like(slot.parameter, requires_grad=False)
            self._submit()

    def landed(self) -> _Flight:
        """Make ready for the next window; returns what was sent in this one."""
        flight, self._flight, self._results = self._flight, _Flight(), {}
        return flight

    def take(self, flight: _Flight) -> None:
        """Keep the results until the next window is closed.

        Raises:
            FusionError: the reduction failed.
        """
        assert flight.handle is not None
        for slot, output in zip(self._slots, flight.handle.result(), strict=True):
            grad = flight.grads[slot.index]
            reduced = torch.view_as_complex(output) if grad.is_complex() else output
            self._results[slot.index] = reduced if grad.requires_grad else grad

    def settle(self, used: set[int] | None, arrived: Flag) -> None:
        """Remember what did not get across, for the slots that were used; for None, as it was before.

        Args:
            used: indices of slots.
            arrived: whether the results of all buckets were finite; if not, as it was before too.
        """
        if self._ledger is None:
            return
        if isinstance(arrived, torch.Tensor) and self._device == "cpu":
            arrived = bool(arrived)  # Parameters on a device and on the CPU: the host has to know.
        if used is None:
            self._ledger.rollback()
        else:
            self._ledger.commit([slot.index in used for slot in self._slots], arrived)

    def _submit(self) -> None:
        inputs: list[torch.Tensor] = []
        outputs: list[torch.Tensor | None] = []
        for slot in self._slots:
            grad = self._flight.grads[slot.index]
            values = torch.view_as_real(grad.detach()) if grad.is_complex() else grad.data
            inputs.append(values)
            # A gradient that is part of a graph (`create_graph=True`) must not be written to.
            outputs.append(torch.empty_like(values) if grad.requires_grad else values)
        warm = self._compressing.warm
        extra: Any = None if warm else self._extra
        self._flight.handle = self._wire.group.submit(
            self._requests[warm], inputs, outputs, extra=extra, unpack=list, ready=self._flight.ready
        )


def real_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """The shape of a gradient as it travels: a complex number is two."""
    return (*parameter.shape, 2) if parameter.is_complex() else tuple(parameter.shape)


def real_dtype(parameter: torch.Tensor) -> torch.dtype:
    """The dtype of a gradient as it travels."""
    return parameter.dtype.to_real() if parameter.is_complex() else parameter.dtype


def _split(
    slots: Sequence[Slot], compressing: Compressing, threshold: int
) -> list[tuple[Compressor, list[Slot]]]:
    """Cut the order into buckets of one compressor, dtype and kind of device, in the order in which they are
    complete."""
    chosen = [
        (
            compressing.policy.choose(slot.name, slot.parameter.shape),
            real_dtype(slot.parameter),
            slot.parameter.device.type,
            position,
            slot,
        )
        for position, slot in enumerate(slots)
    ]
    chosen = [each for each in chosen if each[0] != Uncompressed()]
    chosen.sort(key=lambda each: (each[0].spec, str(each[1]), *each[2:4]))
    found: list[tuple[int, Compressor, list[Slot]]] = []
    for (compressor, dtype, _), kin in groupby(chosen, key=lambda each: each[:3]):
        filled = threshold + 1
        for *_, position, slot in kin:
            nbytes = torch.Size(real_shape(slot.parameter)).numel() * ITEM_SIZE[name_of(dtype)]
            if filled + nbytes > threshold:
                found.append((position, compressor, []))
                filled = 0
            filled += nbytes
            found[-1] = position, compressor, [*found[-1][2], slot]
    return [(compressor, members) for _, compressor, members in sorted(found, key=lambda each: each[0])]
