"""Gradients live in fixed buckets of shared memory and are reduced there, with nothing copied in or out.

On GPUs the memory is the rank's own. The votes then travel by themselves, through
host memory, so that nobody waits for the device to read them.

The buckets are first laid out in reverse order of the parameters, and once more
after the first step in the order in which gradients really arrived on rank 0.
The same gradients then meet in the same buckets in every run, so the sums have
the same bits. The last bucket leaves when the window is closed, because the
votes ride at its end.

Used on the threads that train. A view is written by other ranks between the
submission of its bucket and the end of `close`, and by this rank at other times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from coordinator.handle import Handle, wait_all
from coordinator.messages import OpKind, ReduceOp, Region, Request
from fusion.bucketing import Bucket, Item, Layout, lay_out
from fusion.dtypes import name_of
from fusion.torch.carrier import Wire
from fusion.torch.compression import NoneCompressor
from fusion.torch.dynamic import Dynamic
from fusion.torch.objects import broadcast_object
from fusion.torch.slots import Parcel, Slot

if TYPE_CHECKING:
    from fusion.arena import Arena
    from fusion.cuda.arena import DeviceArena


class Static:
    """The carrier of `buckets="static"`. Making one is collective.

    Args:
        scope: first part of all names, unique to the optimizer.
        wire: what is done to gradients on their way.
        dynamic: for gradients that have no place in a bucket.
        slots: the parameters that get a place, in the order of the model; all on one device.
        votes: how many votes ride along.
        threshold: bytes of a bucket.
    """

    def __init__(
        self, scope: str, wire: Wire, dynamic: Dynamic, slots: Sequence[Slot], *, votes: int, threshold: int
    ) -> None:
        self._scope = scope
        self._wire = wire
        self._dynamic = dynamic
        self._slots = {slot.index: slot for slot in slots}
        self._device = slots[0].parameter.device.type if slots else "cpu"
        self._votes = votes if self._device == "cpu" else 0
        self._threshold = threshold
        self._generation = 0
        self._arrived: list[int] | None = []
        order = [slot.index for slot in reversed(slots)]
        layout = self._layout(order)
        handles = {
            dtype: _create_arena(wire, max(size, 1), self._device)
            for dtype, size in layout.arena_bytes.items()
        }
        self._arenas: dict[str, Arena | DeviceArena] = {
            dtype: handle.result() for dtype, handle in handles.items()
        }
        self._settle_in(order, layout)

    @staticmethod
    def serves(wire: Wire) -> str | None:
        """Why static buckets cannot carry gradients this way, or None if they can."""
        if wire.compression is not NoneCompressor:
            return "compression makes a copy of every gradient"
        if wire.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            return f"op is {wire.op.name}, not Average or Sum"
        return None

    def send(self, slot: Slot, grad: torch.Tensor, nth: int) -> Parcel:
        """Put the gradient in its place, and submit the bucket if this was the last one missing."""
        view = self._views.get(slot.index)
        if nth or view is None:
            return self._dynamic.send(slot, grad, nth)
        if grad is not view:
            view.data.copy_(grad.detach())
            if not grad.requires_grad:
                slot.parameter.grad = grad = view
        if self._arrived is not None:
            self._arrived.append(slot.index)
        bucket = self._bucket_of[slot.index]
        bucket.missing.discard(slot.index)
        if self._device != "cpu":
            bucket.streams.add(self._wire.group.devices.stream())
        if not bucket.missing and bucket is not self._buckets[-1]:
            bucket.submit()
        return Parcel(grad, lambda: view)

    def fill(self, slot: Slot, nth: int) -> Parcel:
        """The result, for a gradient whose place was sent as zeros."""
        view = self._views.get(slot.index)
        if nth or view is None:
            return self._dynamic.fill(slot, nth)
        return Parcel(view, lambda: view)

    def close(self, slots: Sequence[Slot], votes: list[float]) -> list[float]:
        """Zero the places that got no gradient, add the votes, and send what is left."""
        if not self._buckets:
            return self._dynamic.close(slots, votes)
        for bucket in self._buckets:
            for index in bucket.missing:
                self._views[index].data.zero_()
        if self._votes:
            self._ballot.copy_(torch.tensor(votes))
        for bucket in self._buckets:
            if bucket.handle is None:
                bucket.submit()
        handles = [bucket.opened() for bucket in self._buckets]
        agreed = [] if self._votes else self._dynamic.close(slots, votes)
        wait_all(handles)
        for handle in handles:
            handle.result()
        return self._ballot.tolist() if self._votes else agreed

    def reorder(self) -> None:
        """After the first window: lay the buckets out in the order of arrival. Collective."""
        if self._arrived is None:
            return
        order = broadcast_object(
            self._arrived, self._wire.group.ranks[0], f"{self._scope}order", self._wire.process_set
        )
        if not order:
            self._arrived = []
            return
        self._arrived = None
        order = list(dict.fromkeys([*order, *self._order]))
        if order == self._order:
            return
        values = {index: view.clone() for index, view in self._views.items()}
        old = self._views
        for arena in self._arenas.values():
            arena.tensor(0, (arena.nbytes,), "uint8").zero_()
        self._generation += 1
        self._settle_in(order, self._layout(order))
        for index, value in values.items():
            self._views[index].data.copy_(value)
            self._move(self._slots[index], old[index], self._views[index])

    @staticmethod
    def _move(slot: Slot, old: torch.Tensor, new: torch.Tensor) -> None:
        if slot.parameter.grad is old:
            slot.parameter.grad = new
        if slot.settled is not None and slot.settled[0] is old:
            slot.settled = (new, new._version)

    def _layout(self, order: Sequence[int]) -> Layout:
        items = []
        for index in order:
            parameter = self._slots[index].parameter
            items.append(Item(index, name_of(parameter.dtype), parameter.numel()))
        return lay_out(items, self._threshold, self._votes)

    def _settle_in(self, order: list[int], layout: Layout) -> None:
        self._order = order
        self._views: dict[int, torch.Tensor] = {}
        self._buckets: list[_Open] = []
        self._bucket_of: dict[int, _Open] = {}
        for number, bucket in enumerate(layout.buckets):
            arena = self._arenas[bucket.dtype]
            name = f"{self._scope}bucket{number}.{self._generation}"
            opened = _Open(name, self._wire, bucket, arena, self._device)
            self._buckets.append(opened)
            for place in bucket.places:
                self._bucket_of[place.item.key] = opened
                self._views[place.item.key] = _view(
                    arena, place.offset, self._slots[place.item.key].parameter
                )
        if self._buckets:
            last = layout.buckets[-1]
            assert last.votes_at is not None
            self._ballot = self._arenas[last.dtype].tensor(last.votes_at, (self._votes,), last.dtype)


class _Open:
    """A bucket and what has happened to it in this window."""

    def __init__(
        self, name: str, wire: Wire, bucket: Bucket, arena: Arena | DeviceArena, device: str
    ) -> None:
        self._flat = arena.tensor(bucket.offset, (bucket.count,), bucket.dtype)
        region = Region(arena.number, bucket.offset)
        self._wire = wire
        self._request = wire.request(name, (bucket.dtype,), ((bucket.count,),), region, device)
        self.streams: set[int] = set()
        """Of the device, that gradients were put here on."""
        self._members = frozenset(place.item.key for place in bucket.places)
        self.missing = set(self._members)
        self.handle: Handle | None = None

    def submit(self) -> None:
        """Have the bucket reduced where it is."""
        group, flat = self._wire.group, [self._flat]
        ready = group.devices.marks(self.streams) if self.streams else ()
        self.handle = group.submit(self._request, flat, flat, ready=ready)

    def opened(self) -> Handle:
        """Make ready for the next window; returns the handle of this one."""
        handle, self.handle = self.handle, None
        self.missing = set(self._members)
        self.streams.clear()
        assert handle is not None
        return handle


def _create_arena(wire: Wire, nbytes: int, device: str) -> Handle:
    """Ask the ranks for an arena of `nbytes` bytes each; the result is a `fusion.arena.Arena`,
    or a `fusion.cuda.arena.DeviceArena`."""
    group = wire.group
    name = group.unnamed("arena", blocking=False)
    request = Request(name, OpKind.ARENA, ("uint8",), ((nbytes,),), device=device)
    return group.submit(request, (), [None])


def _view(arena: Arena | DeviceArena, offset: int, parameter: torch.Tensor) -> torch.Tensor:
    """A gradient at `offset` with the memory layout that autograd gives gradients of `parameter`.

    `.data` gives it a version counter of its own, so that writes to one gradient
    can be told from writes to its neighbours.
    """
    flat = arena.tensor(offset, (parameter.numel(),), name_of(parameter.dtype))
    strides = torch.empty_like(parameter, device="meta").stride()
    return flat.as_strided(parameter.shape, strides).data
