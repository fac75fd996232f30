"""Decides how the gradients of an optimizer travel.

Called on the thread that makes the optimizer, and again when its parameters or
the runtime change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from fusion import runtime
from fusion.torch.carrier import FLAGS, Carrier, Wire
from fusion.torch.compressed import Compressed
from fusion.torch.compressing import Compressing
from fusion.torch.dynamic import Dynamic
from fusion.torch.groups import Grouped, split
from fusion.torch.slots import Slot
from fusion.torch.static import Static

Buckets = Literal["dynamic", "static"]
_MIB = 1 << 20


def carrier_maker(
    wire: Wire,
    buckets: Buckets | None,
    groups: int | Sequence[Sequence[torch.Tensor]] | None,
    slots: Sequence[Slot],
    compressing: Compressing | None = None,
) -> Callable[[str, Sequence[Slot]], Carrier]:
    """How to make a carrier for a scope of names and the parameters present.

    Args:
        wire: what is done to gradients on their way.
        buckets: what the user asked for, or None for the setting.
        groups: of gradients that travel together, or None.
        slots: the parameters at first.
        compressing: how buckets are compressed, if they are: then they are fixed, whatever `buckets` says.

    Raises:
        ValueError: the options contradict each other.
    """
    if buckets not in (None, "dynamic", "static"):
        raise ValueError(f'buckets must be "dynamic" or "static", not {buckets!r}')
    grouped = split([slot for slot in slots if slot.parameter.requires_grad], groups) if groups else []
    obstacle = Static.serves(wire) if not grouped else "groups= puts gradients into groups of their own"
    if compressing is not None:
        if grouped:
            raise ValueError(
                "groups= cannot be used with a bucket compressor, whose buckets are groups of their own: "
                "leave it out; a fusion.compression.Policy has rules for single parameters"
            )
        obstacle = None
    if buckets == "static" and obstacle is not None:
        raise ValueError(f'buckets="static" cannot be used: {obstacle}')

    def make(scope: str, present: Sequence[Slot]) -> Carrier:
        config = runtime.current().config
        dynamic = Dynamic(scope, wire)
        threshold = int(config.fusion_threshold_mb * _MIB)
        if compressing is not None:
            return Compressed(scope, wire, dynamic, present, compressing=compressing, threshold=threshold)
        if grouped:
            return Grouped(scope, wire, dynamic, grouped)
        if (buckets or config.buckets) == "static" and obstacle is None:
            placed = [
                slot for slot in present if slot.parameter.requires_grad and not slot.parameter.is_complex()
            ]
            # What is on another kind of device than the first goes the dynamic way.
            placed = [slot for slot in placed if slot.parameter.device == placed[0].parameter.device]
            votes = len(present) + FLAGS
            return Static(scope, wire, dynamic, placed, votes=votes, threshold=threshold)
        return dynamic

    return make
