"""What happens to gradients between two steps: counted, sent, agreed upon and put back.

A window lasts from one reduction of all gradients to the next. In it, each
parameter's gradient is sent when its last expected backward pass has added to
it. At the end every rank votes for which parameters it has gradients; a rank
that lacks one which others have adds zeros, so every rank ends with the same
gradients whatever part of the model it used.

Hooks run on autograd's threads, everything else on the thread that trains.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from coordinator.errors import FusionError
from coordinator.messages import ReduceOp
from fusion import runtime
from fusion.torch.carrier import FLAGS, Carrier, Wire
from fusion.torch.compressed import Compressed
from fusion.torch.compression import Compressor
from fusion.torch.ops import allgather, allreduce_
from fusion.torch.process_sets import ProcessSet
from fusion.torch.slots import Parcel, Slot
from fusion.torch.sparse import sparse_allreduce_async
from fusion.torch.static import Static
from fusion.torch.submission import overlaps

_owners: Any = WeakIdKeyDictionary()
"""Parameter -> weak reference to the window that reduces it. A parameter that two
optimizers train is reduced once for both; the entry dies with the parameter."""


class Window:
    """Reduces the gradients of some parameters.

    Args:
        slots: the parameters.
        wire: what is done to gradients on their way.
        passes: backward passes before a gradient is sent.
        make_carrier: called with the scope of names and the slots.
        sparse_as_dense: reduce sparse gradients as dense ones.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        wire: Wire,
        passes: int,
        make_carrier: Callable[[str, Sequence[Slot]], Carrier],
        sparse_as_dense: bool,
    ) -> None:
        self.passes = passes
        self.settled = False
        """The gradients at hand are reduced, and no pass has added to one since."""
        self._wire = wire
        self._make_carrier = make_carrier
        self._sparse_as_dense = sparse_as_dense
        self._thread = threading.get_ident()
        self._busy = False
        self._slots: list[Slot] = []
        self._borrowed: list[Slot] = []
        self._sent = False
        self.add(slots)

    def add(self, slots: Iterable[Slot]) -> None:
        """Take charge of more parameters. Collective; nothing may be in flight."""
        self._borrowed.extend(slots)
        self._adopt()
        self._start()

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that gradients are reduced over."""
        return self._wire.process_set

    @property
    def compression(self) -> type[Compressor]:
        """What is done to values on their way."""
        return self._wire.compression

    def close(self) -> None:
        """Stop reducing."""
        for slot in self._slots:
            for hook in slot.hooks:
                hook.remove()
            slot.hooks.clear()
            if _owner(slot) is self:
                del _owners[slot.parameter]
        self._slots = []

    @property
    def in_flight(self) -> bool:
        """Whether a gradient of this or of a window it borrows from has been sent and not been put back."""
        if self._busy:
            return False
        return self._sent or any(lender.in_flight for lender in self._lenders())

    @property
    def reads_must_wait(self) -> bool:
        """Whether whoever now looks at gradients would see some that are on their way."""
        return threading.get_ident() == self._thread and self.in_flight

    def settle(self, *, keep: bool) -> None:
        """Complete the window: every gradient is reduced and put back. Collective.

        Args:
            keep: whether the gradients are wanted; if not, they are forgotten.

        Raises:
            FusionError: a reduction failed; the optimizer is usable afterwards.
        """
        if self._adopt() or runtime.current() is not self._runtime:
            self._start()
        for lender in self._lenders():
            if not lender.settled:
                lender.settle(keep=True)  # Its own parameters may be wanted still.
        self._busy = True
        try:
            self._settle(keep)
        finally:
            self._busy = self._sent = False
            for slot in self._slots:
                slot.passes, slot.parcels, slot.current = 0, [], None
                slot.carry, slot.disturbed = None, False
        self.settled = keep

    def forget(self) -> None:
        """The caller throws all gradients away: wait for what is in flight, then start afresh."""
        if self.in_flight:
            self.settle(keep=False)
        self.settled = False
        for slot in self._slots:
            slot.reset()

    # What autograd calls.

    def _before(self, slot: Slot) -> None:
        """A gradient is about to be added to `slot.parameter.grad`."""
        if slot.current is not None or slot.settled is not None:
            slot.set_aside()

    def _after(self, slot: Slot) -> None:
        """A gradient was added to `slot.parameter.grad`."""
        self.settled = False
        slot.passes += 1
        grad = slot.parameter.grad
        if slot.passes < self.passes or grad is None or runtime.current() is not self._runtime:
            return
        if not grad.is_sparse:
            self._send(slot, grad)
        elif self._sparse_as_dense:
            self._send_dense(slot, grad)

    # The end of a window.

    def _settle(self, keep: bool) -> None:
        for slot in self._slots:
            self._send_rest(slot)
        repeats = sum(len(slot.parcels) > 1 for slot in self._slots)
        sparse = [_is_sparse(slot) for slot in self._slots]
        used = [float(bool(slot.parcels)) for slot in self._slots]
        flags = [float(keep), float(not keep), float(repeats > 0), float(any(sparse))]
        agreed = self._carrier.close(self._slots, used + flags)
        keeping, dropping, repeated, any_sparse = (vote > 0 for vote in agreed[-FLAGS:])
        counts, sparse = [int(vote > 0) for vote in agreed[:-FLAGS]], [False] * len(self._slots)
        if repeated or any_sparse:
            counts, sparse = self._details()
        self._catch_up(counts, sparse)
        self._put_back(keep)
        if isinstance(self._carrier, (Static, Compressed)):
            self._carrier.reorder()
        if keeping and dropping:
            self._refuse(keep)

    def _send_rest(self, slot: Slot) -> None:
        """Send a gradient that is at hand and was not sent: too few passes, or set by hand."""
        grad = slot.parameter.grad
        slot.inspect()
        if slot.current is not None or grad is None:
            return
        if slot.unchanged:
            slot.set_aside()
        elif not grad.is_sparse:
            if overlaps(grad):
                slot.parameter.grad = grad = grad.contiguous()
            self._send(slot, grad)
        elif self._sparse_as_dense:
            self._send_dense(slot, grad)

    def _send(self, slot: Slot, grad: torch.Tensor) -> None:
        self._sent = True
        slot.sent(self._carrier.send(slot, grad, len(slot.parcels)))

    def _send_dense(self, slot: Slot, grad: torch.Tensor) -> None:
        """Reduce a sparse gradient as a dense one; it comes back sparse."""
        self._send(slot, grad.to_dense())
        parcel = slot.parcels.pop()
        slot.parameter.grad = grad
        slot.sent(_sparsely(parcel, grad))

    def _details(self) -> tuple[list[int], list[bool]]:
        """What one vote cannot say: how often each gradient was sent at most, and which are sparse."""
        counts = [len(slot.parcels) for slot in self._slots]
        sparse = [int(_is_sparse(slot)) for slot in self._slots]
        name = f"{self._scope}details"
        most = allreduce_(
            torch.tensor([counts, sparse]), op=ReduceOp.MAX, name=name, process_set=self._wire.process_set
        )
        return most[0].tolist(), [bool(flag) for flag in most[1].tolist()]

    def _catch_up(self, counts: list[int], sparse: list[bool]) -> None:
        """Send what this rank lacks and others have sent."""
        for slot, count, is_sparse in zip(self._slots, counts, sparse, strict=True):
            grad = slot.parameter.grad
            if is_sparse and count == 0:
                slot.parcels.append(self._gather(slot))
            elif grad is not None and grad.is_sparse and slot.current is None:
                slot.parameter.grad = grad.to_dense()
                self._send(slot, slot.parameter.grad)
            while len(slot.parcels) < count:
                parcel = self._carrier.fill(slot, len(slot.parcels))
                back_sparse = is_sparse and self._sparse_as_dense
                slot.parcels.append(_sparsely(parcel, parcel.grad.to_sparse(1)) if back_sparse else parcel)

    def _gather(self, slot: Slot) -> Parcel:
        """Reduce a gradient that is sparse on some ranks and absent on the others."""
        parameter, grad = slot.parameter, slot.parameter.grad
        if grad is None:
            rows = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
            values = torch.empty(0, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
            grad = torch.sparse_coo_tensor(rows, values, parameter.shape)
        op = self._wire.op
        name, process_set = f"{self._scope}{slot.name}", self._wire.process_set
        handle = sparse_allreduce_async(grad, name=name, op=op, process_set=process_set)
        scale = self._wire.prescale * self._wire.postscale
        return Parcel(grad, lambda: handle.result() * scale if scale != 1.0 else handle.result())

    def _put_back(self, keep: bool) -> None:
        errors: list[BaseException] = []
        disturbed = []
        for slot in self._slots:
            values = []
            for parcel in slot.parcels:
                try:
                    values.append((parcel.wait(), parcel.dropped))
                except FusionError as error:
                    errors.append(error)
            if slot.disturbed:
                disturbed.append(slot.name)
            if keep:
                self._assemble(slot, [value for value, dropped in values if not dropped])
        if errors:
            raise errors[0]
        if disturbed and keep:
            raise FusionError(
                f"the gradients of {', '.join(disturbed[:5])} were changed while they were being reduced: "
                "call optimizer.synchronize() after backward() and before clipping or writing to gradients, "
                "and optimizer.zero_grad() rather than model.zero_grad() between two backward passes"
            )

    def _assemble(self, slot: Slot, values: list[torch.Tensor]) -> None:
        """Make the reduced gradient of what came back and what had been reduced before."""
        if slot.carry is not None:
            values.append(slot.carry)
        if not values:
            return
        total, *others = values
        for other in others:
            total = total + other
        slot.parameter.grad = total
        slot.settled = (total, total._version)

    def _refuse(self, keep: bool) -> None:
        """Some ranks step and others have thrown their gradients away: say which."""
        rank = torch.tensor([runtime.current().topology.rank if not keep else -1])
        ranks = allgather(rank, name=f"{self._scope}dropped", process_set=self._wire.process_set)
        dropped = [r for r in ranks.tolist() if r >= 0]
        raise FusionError(
            f"ranks {dropped} threw their gradients away with zero_grad() in a step for which the others "
            "kept theirs, so they would no longer train the same model: let every rank skip the step, or none"
        )

    # Which parameters are this window's.

    def _start(self) -> None:
        """Make a carrier for the present parameters, with names that no other optimizer has."""
        self._runtime = runtime.current()
        number = self._wire.group.unnamed("optimizer", blocking=False).rpartition(".")[2]
        self._scope = f"optimizer{number}."
        self._carrier = self._make_carrier(self._scope, self._slots)

    def _adopt(self) -> bool:
        """Take over parameters that no living window reduces, and hook those that can have gradients now.

        Returns whether there were any to take over.
        """
        mine = [slot for slot in self._borrowed if _owner(slot) in (None, self)]
        if mine:
            self._borrowed = [slot for slot in self._borrowed if slot not in mine]
            self._slots.extend(mine)
            self._slots.sort(key=lambda slot: slot.index)
            for slot in mine:
                _owners[slot.parameter] = weakref.ref(self)
        for slot in self._slots:
            if not slot.hooks and slot.parameter.requires_grad:
                self._hook(slot)
        return bool(mine)

    def _hook(self, slot: Slot) -> None:
        window = weakref.ref(self)

        def before(_: torch.Tensor) -> None:
            found = window()
            if found is not None:
                found._before(slot)

        def after(_: torch.Tensor) -> None:
            found = window()
            if found is not None:
                found._after(slot)

        # A compiler of backward passes calls the hooks; it must not compile what they do.
        slot.hooks = [
            slot.parameter.register_hook(torch.compiler.disable(before)),
            slot.parameter.register_post_accumulate_grad_hook(torch.compiler.disable(after)),
        ]

    def _lenders(self) -> list[Window]:
        """The windows that reduce parameters this one wants reduced, in an order all ranks share."""
        found = {window._scope: window for slot in self._borrowed if (window := _owner(slot)) is not None}
        return [found[scope] for scope in sorted(found)]


class Idle(Window):
    """The window of a rank that is not in the optimizer's process set: its gradients stay as they are."""

    def add(self, slots: Iterable[Slot]) -> None:
        """Take charge of nothing."""

    def settle(self, *, keep: bool) -> None:
        """Be done: there is nothing to reduce."""
        self.settled = keep


def _owner(slot: Slot) -> Window | None:
    reference = _owners.get(slot.parameter)
    return None if reference is None else reference()


def _is_sparse(slot: Slot) -> bool:
    grad = slot.parameter.grad
    return grad is not None and grad.is_sparse


def _sparsely(parcel: Parcel, grad: torch.Tensor) -> Parcel:
    """A parcel that travels dense and comes back as sparse as `grad`."""
    return Parcel(grad, lambda: parcel.wait().to_sparse(grad.sparse_dim()))
