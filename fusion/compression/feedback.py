"""Error feedback: what a compressor could not send is added to what it is given the next time.

EF-SGD (Stich et al. 2018, arXiv:1809.07599; Karimireddy et al. 2019, arXiv:1901.09847): with a
memory e, a bucket g is sent as C(g + e), and e becomes what of g + e did not get across. Over any
number of steps the sum of what was sent and the last e is exactly, up to rounding, the sum of what
was given.

What is remembered is kept for each tensor by its name, not for a bucket, so tensors may meet in
other buckets from one step to the next. A bucket is opened as a `Ledger`; what it stages counts from
`commit` on, and `rollback` leaves everything as it was, for a step whose result is thrown away.

Used by one thread at a time. Memory: two buckets of float32 each, the residuals and the ones
being made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from fusion.compression.base import BucketInfo, Compressor, Key, Memory
from fusion.compression.registry import with_feedback

Flag = bool | torch.Tensor
"""Whether something is so; of a bucket on a device a bool there, which the host does not read."""


def all_of(flags: Iterable[Flag]) -> Flag:
    """Whether all are so."""
    unseen: list[torch.Tensor] = []
    for flag in flags:
        if isinstance(flag, torch.Tensor):
            unseen.append(flag)
        elif not flag:
            return False
    return torch.stack(unseen).all() if unseen else True


class Ledger:
    """The memories of the tensors of one bucket, during one exchange.

    Args:
        info: the bucket.
        memories: of its pieces, in order.
        feedback: whether residuals are kept.
        immediate: whether what is staged counts at once, with no `commit` of the owner.

    Attributes:
        arrived: what was staged last is worth remembering, and was not rolled back.
    """

    def __init__(
        self, info: BucketInfo, memories: Sequence[Memory], *, feedback: bool, immediate: bool = False
    ) -> None:
        self.immediate = immediate
        self.arrived: Flag = True
        self.info = info
        self.memories = memories
        self.feedback = feedback
        self._staged: torch.Tensor | None = None
        self._spare: torch.Tensor | None = None
        self._whole: torch.Tensor | None = None
        """The bucket whose parts the residuals were when they were last committed here."""
        self._parts: list[torch.Tensor] = []

    def buffer(self, empty: Callable[[int], torch.Tensor] = torch.empty) -> torch.Tensor:
        """Room for the bucket, which becomes the residuals if it is staged and committed.

        Residuals that are elsewhere, as of a checkpoint, are brought to where the bucket is.

        Args:
            empty: memory for so many elements, float32.
        """
        self.arrived = True
        spare, self._spare = self._spare, None
        bucket = empty(self.info.count) if spare is None else spare
        for memory in self.memories:
            residual = memory.residual
            if residual is not None and residual.device != bucket.device:
                if residual.is_cuda:  # Any stream may have written it, and this happens once.
                    torch.cuda.synchronize(residual.device)
                memory.residual = empty(len(residual)).copy_(residual)
        return bucket

    def add_to(self, bucket: torch.Tensor) -> None:
        """Add the residuals to the bucket."""
        if not self.feedback:
            return
        pairs = [
            (piece.of(bucket), memory.residual)
            for piece, memory in zip(self.info.pieces, self.memories, strict=True)
            if memory.residual is not None
        ]
        if pairs:
            torch._foreach_add_([part for part, _ in pairs], [residual for _, residual in pairs])

    def stage(self, bucket: torch.Tensor, arrived: Flag = True) -> None:
        """`bucket` is what did not get across; it is kept, not copied.

        Args:
            arrived: if it turns out not to be so, a commit leaves everything as it was.
        """
        self.arrived = arrived
        if self.feedback:
            self._staged = bucket
        else:
            self._spare = bucket

    def commit(self, wanted: Iterable[bool] | None = None, provided: Flag = True) -> None:
        """What was staged is from now on what is remembered.

        Args:
            wanted: for each piece, whether its result was used; by default all were.
            provided: if it turns out not to be so, everything stays as it was.
        """
        if provided is False:
            self.rollback()
        staged, self._staged = self._staged, None
        if staged is None:
            return
        chosen = [True] * len(self.memories) if wanted is None else list(wanted)
        parts = [piece.of(staged) for piece in self.info.pieces]
        replaced = all(
            memory.residual is part for memory, part in zip(self.memories, self._parts, strict=False)
        )
        self._spare = self._whole if replaced else None
        for memory, part, used in zip(self.memories, parts, chosen, strict=True):
            if not used:
                part.zero_() if memory.residual is None else part.copy_(memory.residual)
        certain = all_of((self.arrived, provided))
        if isinstance(certain, torch.Tensor):
            self._undo_unless(certain, staged, parts)
        for memory, part in zip(self.memories, parts, strict=True):
            memory.residual = part
        self._whole, self._parts = staged, parts

    def _undo_unless(self, certain: torch.Tensor, staged: torch.Tensor, parts: list[torch.Tensor]) -> None:
        """Write what is remembered over what was staged, unless `certain`, which only the device knows."""
        if self._spare is not None:
            torch.where(certain, staged, self._spare, out=staged)
            return
        for memory, part in zip(self.memories, parts, strict=True):
            if memory.residual is None:
                part.masked_fill_(~certain, 0.0)
            else:
                torch.where(certain, part, memory.residual, out=part)

    def rollback(self) -> None:
        """Forget what was staged."""
        self.arrived = False
        if self._staged is not None:
            self._spare, self._staged = self._staged, None


class Memories:
    """What is remembered of tensors, by name."""

    def __init__(self) -> None:
        self._memories: dict[str, Memory] = {}

    def open(self, info: BucketInfo, *, feedback: bool, immediate: bool = False) -> Ledger:
        """The ledger of a bucket.

        Args:
            info: the bucket.
            feedback: see `Ledger`.
            immediate: see `Ledger`.

        Raises:
            ValueError: what is remembered of a tensor has another shape than the tensor.
        """
        memories = []
        for piece in info.pieces:
            memory = self._memories.setdefault(piece.name, Memory())
            if memory.residual is not None and memory.residual.numel() != piece.count:
                raise ValueError(
                    f"the residual of '{piece.name}' has {memory.residual.numel()} elements, but the "
                    f"tensor has shape {tuple(piece.shape)}: call reset() to start without residuals"
                )
            memories.append(memory)
        return Ledger(info, memories, feedback=feedback, immediate=immediate)

    def residual(self, name: str) -> torch.Tensor | None:
        """What of a tensor has not got across so far, flat, a copy; None for nothing."""
        memory = self._memories.get(name)
        return None if memory is None or memory.residual is None else memory.residual.clone()

    def reset(self) -> None:
        """Forget everything; ledgers that are open see it too."""
        for memory in self._memories.values():
            memory.residual = memory.basis = None

    def forget_residuals(self) -> None:
        """Forget what has not got across, but not where to start from."""
        for memory in self._memories.values():
            memory.residual = None

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """What is remembered, by tensor; copies."""
        state: dict[str, dict[str, torch.Tensor]] = {}
        for name, memory in self._memories.items():
            kept = {"residual": memory.residual, "basis": memory.basis}
            found = {key: value.clone() for key, value in kept.items() if value is not None}
            if found:
                state[name] = found
        return state

    def load_state_dict(
        self, state: Mapping[str, Mapping[str, Any]], shapes: Mapping[str, Sequence[int]] | None = None
    ) -> None:
        """Replace what is remembered; if it raises, nothing has changed.

        Args:
            state: of `state_dict`.
            shapes: the tensors there are, to check against.

        Raises:
            ValueError: there is no such tensor, or its residual has another number of elements.
        """
        if shapes is not None:
            for name, kept in state.items():
                _check(name, kept.get("residual"), shapes)
        self.reset()
        for name, kept in state.items():
            residual, basis = kept.get("residual"), kept.get("basis")
            memory = self._memories.setdefault(name, Memory())
            if residual is not None:
                memory.residual = residual.detach().reshape(-1).to(torch.float32, copy=True)
            if basis is not None:
                memory.basis = basis.detach().to(torch.float32, copy=True)


class Feedback:
    """A compressor with a memory, for tensors by name.

    Pass it as `compression=` to operations, each call with the same name for the same tensor;
    or use `encode` and `decode` for a message of your own. An optimizer makes its own from a
    compressor.

    Args:
        compressor: the method; its own `feedback` is switched on.

    Attributes:
        memories: what is remembered, for saving, loading and forgetting.
    """

    def __init__(self, compressor: Compressor) -> None:
        self.compressor = with_feedback(compressor, True)
        self.memories = Memories()

    def open(self, info: BucketInfo) -> Ledger:
        """The ledger of a bucket that certainly arrives."""
        return self.memories.open(info, feedback=True, immediate=True)

    def encode(self, values: torch.Tensor, info: BucketInfo, key: Key) -> torch.Tensor:
        """Like `Compressor.encode`, with feedback; for a message that certainly arrives.

        What was not finite is not remembered: the payload says NaN.
        """
        ledger = self.open(info)
        bucket = ledger.buffer().copy_(values)
        ledger.add_to(bucket)
        finite = bool(torch.isfinite(bucket).all())
        payload = self.compressor.encode(
            bucket if finite else bucket.fill_(float("nan")), info, key, ledger.memories
        )
        self.compressor.add(payload, info, bucket, sign=-1)
        if finite:
            ledger.stage(bucket)
            ledger.commit()
        return payload

    def decode(self, payload: torch.Tensor, info: BucketInfo) -> torch.Tensor:
        """Like `Compressor.decode`."""
        return self.compressor.decode(payload, info)


def _check(name: str, residual: torch.Tensor | None, shapes: Mapping[str, Sequence[int]]) -> None:
    if name not in shapes:
        raise ValueError(f"the saved state has a residual of '{name}', which is no tensor here")
    count = torch.Size(shapes[name]).numel()
    if residual is not None and residual.numel() != count:
        raise ValueError(
            f"the saved residual of '{name}' has {residual.numel()} elements, but the tensor has shape "
            f"{tuple(shapes[name])}: the checkpoint is of another model. Remove its 'compression' entry to "
            "start without residuals"
        )
