"""How gradients travel: the interface behind `buckets="dynamic"`, `"static"` and `groups=`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec
import torch

from coordinator.messages import OpKind, ReduceOp, Region, Request
from fusion.torch.compression import Compressor
from fusion.torch.process_sets import ProcessSet, global_process_set, group_of
from fusion.torch.slots import Parcel, Slot

if TYPE_CHECKING:
    from fusion.group import Group

FLAGS = 4
"""Votes beside one for each parameter: keeping, dropping, sent more than once, sparse."""


class Wire(msgspec.Struct, frozen=True):
    """What is done to gradients on their way."""

    op: ReduceOp
    prescale: float
    postscale: float
    compression: type[Compressor]
    process_set: ProcessSet = global_process_set
    terms: str = ""
    """What the ranks must have in common beside, in words."""

    @property
    def group(self) -> Group:
        """The ranks that gradients are reduced over."""
        return group_of(self.process_set)

    def request(
        self,
        name: str,
        dtypes: tuple[str, ...],
        shapes: tuple[tuple[int, ...], ...],
        region: Region | None = None,
        device: str = "cpu",
        *,
        codec: str = "none",
        terms: str = "",
    ) -> Request:
        """The request to reduce tensors of these dtypes and shapes, on this kind of device."""
        return Request(
            name,
            OpKind.ALLREDUCE,
            dtypes,
            shapes,
            op=self.op,
            prescale=self.prescale,
            postscale=self.postscale,
            device=device,
            region=region,
            codec=codec,
            terms=terms,
        )

    @property
    def adds(self) -> bool:
        """Whether a vote that is positive on some rank stays positive in the result."""
        return self.op in (ReduceOp.SUM, ReduceOp.AVERAGE)


class Carrier(Protocol):
    """Moves gradients of one optimizer.

    A window is what happens between two calls of `close`. Every rank calls
    `close` equally often; everything else may differ from rank to rank.
    """

    def send(self, slot: Slot, grad: torch.Tensor, nth: int) -> Parcel:
        """Send the `nth` gradient of this window; it must not be written to until it is back."""
        ...

    def fill(self, slot: Slot, nth: int) -> Parcel:
        """Send zeros where another rank has sent its `nth` gradient of this window.

        Called after `close`."""
        ...

    def close(self, slots: Sequence[Slot], votes: list[float]) -> list[float]:
        """Complete what the ranks send in common, with the sum or average of their
        votes, of which only the sign counts."""
        ...
