"""Which settings may be tried in a job, and which may not, with the reason: pure functions.

A setting may be tried only if no result depends on it. Each element of a sum is
added up in an order that its collective fixes: in a node by rank, in a ring by the
place of the element in the buffer. A sum of two has the same bits in either order;
of three or more it has not. So in a ring of three, whatever moves elements within
buffers is left alone: fusing other tensors together, cutting other chunks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from coordinator.tuning import Knobs
from fusion.config import Config

KEYS = Knobs.__struct_fields__
"""Every key that tuning may change."""

_CHOICES: dict[str, tuple[Any, ...]] = {
    "fusion_threshold_mb": (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0),
    "cycle_time_ms": (0.25, 0.5, 1.0, 2.0, 5.0, 10.0),
    "chunk_kb": (128, 256, 512, 1024, 2048),
    "ring_segment_kb": (15, 30, 60, 120, 240, 480, 960),
    "hierarchy": ("on", "off"),
}


class Space(msgspec.Struct, frozen=True):
    """The settings that may be tried.

    Attributes:
        start: the settings that the job begins with.
        choices: the values of each key that may be tried, ascending, the one of `start` among them.
        left_alone: why a key is not tried.
    """

    start: Knobs
    choices: dict[str, tuple[Any, ...]]
    left_alone: dict[str, str]

    @property
    def size(self) -> int:
        """How many different settings there are."""
        product = 1
        for values in self.choices.values():
            product *= len(values)
        return product

    def at(self, places: Mapping[str, int]) -> Knobs:
        """The settings at these places in the choices; of other keys, those of the start."""
        return msgspec.structs.replace(
            self.start, **{key: self.choices[key][place] for key, place in places.items()}
        )

    def places(self, knobs: Knobs) -> dict[str, int]:
        """The inverse of `at`."""
        return {key: values.index(getattr(knobs, key)) for key, values in self.choices.items()}

    def changes(self, knobs: Knobs) -> int:
        """How many keys differ from the start."""
        return sum(getattr(knobs, key) != getattr(self.start, key) for key in self.choices)

    def without(self, key: str, reason: str) -> Space:
        """The same with a key left alone."""
        choices = {kept: values for kept, values in self.choices.items() if kept != key}
        return Space(self.start, choices, {**self.left_alone, key: reason})

    # What the data plane must have room for, see `fusion.executor.Room`.

    @property
    def fusion_threshold_mb(self) -> float:
        return max(self.choices.get("fusion_threshold_mb", (self.start.fusion_threshold_mb,)))

    @property
    def chunks_kb(self) -> Sequence[int]:
        return self.choices.get("chunk_kb", (self.start.chunk_kb,))

    @property
    def flat(self) -> bool:
        return "hierarchy" in self.choices


def space_of(config: Config, pinned: Collection[str], nodes: Sequence[Collection[int]]) -> Space:
    """What may be tried in a job.

    Args:
        config: the settings it begins with.
        pinned: the keys that the user gave.
        nodes: the ranks of each node.
    """
    start = Knobs(**{key: getattr(config, key) for key in KEYS})
    left_alone = {key: "it was set" for key in KEYS if key in pinned}
    left_alone = {**_without_effect(start, nodes), **_changing_sums(start, nodes), **left_alone}
    if "hierarchy" not in left_alone and start.hierarchy == "auto":
        start = msgspec.structs.replace(start, hierarchy="on")
    choices = {key: _choices(key, getattr(start, key)) for key in KEYS if key not in left_alone}
    return Space(start, choices, left_alone)


def _choices(key: str, start: Any) -> tuple[Any, ...]:
    values = _CHOICES[key]
    return values if start in values else tuple(sorted((*values, start)))


def _ring(start: Knobs, nodes: Sequence[Collection[int]]) -> int:
    """How many take part in the ring; 1 means that there is none."""
    size = sum(map(len, nodes))
    return size if start.hierarchy == "off" else len(nodes)


def _changing_sums(start: Knobs, nodes: Sequence[Collection[int]]) -> dict[str, str]:
    """The keys on which the order of some sum depends."""
    size, ring = sum(map(len, nodes)), _ring(start, nodes)
    found = {}
    if ring > 2:
        reason = f"it would change the order in which a ring of {ring} adds up"
        found = dict.fromkeys(("fusion_threshold_mb", "cycle_time_ms", "chunk_kb"), reason)
    if size > 2:
        found["hierarchy"] = f"it would change the order in which {size} ranks are added up"
    return found


def _without_effect(start: Knobs, nodes: Sequence[Collection[int]]) -> dict[str, str]:
    found = {}
    if len(nodes) == sum(map(len, nodes)):
        found["hierarchy"] = "every node has one rank"
        found["chunk_kb"] = "every node has one rank"
    if _ring(start, nodes) == 1:
        found["ring_segment_kb"] = "the ranks of one node need no ring"
    return found
