"""Each gradient is a request of its own; the runtime fuses what is ready at the same time.

Gradients are reduced in place. The votes ride in the same fused buffer as the
last gradients, so they cost no round of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from coordinator.handle import Handle
from coordinator.messages import ReduceOp, Request
from fusion.dtypes import name_of
from fusion.torch.carrier import Wire
from fusion.torch.compression import NoneCompressor
from fusion.torch.slots import Parcel, Slot


class Dynamic:
    """The carrier of `buckets="dynamic"`; the others use it for what their buckets have no place for.

    Args:
        scope: first part of all names, unique to the optimizer.
        wire: what is done to gradients on their way.
    """

    def __init__(self, scope: str, wire: Wire) -> None:
        self._scope = scope
        self._wire = wire
        self._requests: dict[tuple[int, int], Request] = {}

    def send(self, slot: Slot, grad: torch.Tensor, nth: int) -> Parcel:
        """Submit a gradient, to be reduced where it is if its graph allows that."""
        values = torch.view_as_real(grad.detach()) if grad.is_complex() else grad.data
        if self._wire.compression is NoneCompressor and not grad.requires_grad:
            handle = self._submit(slot, values, nth)
            return Parcel(grad, lambda: _after(handle, grad))
        return self._send_copy(slot, grad, values, nth)

    def fill(self, slot: Slot, nth: int) -> Parcel:
        """Submit zeros."""
        return self.send(slot, torch.zeros_like(slot.parameter, requires_grad=False), nth)

    def close(self, slots: Sequence[Slot], votes: list[float]) -> list[float]:
        """Reduce the votes, by the gradients' own operation and dtype so that they share a buffer."""
        wire, dtype = self._wire, self._votes_dtype(slots)
        if not wire.adds:
            wire, dtype = Wire(ReduceOp.MAX, 1.0, 1.0, NoneCompressor), torch.float32
        ballot = torch.tensor(votes, dtype=dtype)
        name, shape = f"{self._scope}votes", tuple(ballot.shape)
        request = wire.request(name, (name_of(dtype),), (shape,), terms=wire.terms)
        self._wire.group.submit(request, [ballot], [ballot]).result()
        agreed: list[float] = ballot.tolist()
        return agreed

    def _send_copy(self, slot: Slot, grad: torch.Tensor, values: torch.Tensor, nth: int) -> Parcel:
        """Reduce a copy: compressed, or because the gradient is part of a graph (`create_graph=True`)."""
        compression = self._wire.compression
        sent, ctx = compression.compress(values)
        if sent is values:
            sent = values.clone()
        handle = self._submit(slot, sent, nth)

        def wait() -> torch.Tensor:
            handle.result()
            reduced = compression.decompress(sent, ctx)
            if grad.is_complex():
                reduced = torch.view_as_complex(reduced)
            if grad.requires_grad:
                return reduced
            grad.data.copy_(reduced)
            return grad

        return Parcel(grad, wait)

    def _submit(self, slot: Slot, values: torch.Tensor, nth: int) -> Handle:
        request = self._requests.get((slot.index, nth))
        if (
            request is None
            or request.shapes[0] != values.shape
            or request.dtypes[0] != name_of(values.dtype)
            or (request.device == "cpu") is not values.is_cpu
        ):
            name = f"{self._scope}{slot.name}" + (f"#{nth}" if nth else "")
            dtypes, shapes = (name_of(values.dtype, name),), (tuple(values.shape),)
            request = self._wire.request(name, dtypes, shapes, device=values.device.type)
            self._requests[slot.index, nth] = request
        return self._wire.group.submit(request, [values], [values])

    def _votes_dtype(self, slots: Sequence[Slot]) -> torch.dtype:
        """The dtype that most gradients travel in."""
        counts = Counter(slot.parameter.dtype for slot in slots if slot.parameter.is_floating_point())
        common = counts.most_common(1)[0][0] if counts else torch.float32
        return self._wire.compression.compress(torch.empty(0, dtype=common))[0].dtype


def _after(handle: Handle, grad: torch.Tensor) -> torch.Tensor:
    handle.result()
    return grad
