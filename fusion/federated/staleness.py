"""How much an update counts that started from an old model.

The staleness of an update is the number of new models that the server has made
since the one it started from. Weights are those of FedAsync: Xie, Koyejo and Gupta,
"Asynchronous federated optimization", arXiv 1903.03934, section 5.2. Pure functions.
"""

from __future__ import annotations

import math
from typing import Literal

from msgspec import Struct


class Staleness(Struct, frozen=True, forbid_unknown_fields=True):
    """A weight that falls with staleness t, and is 1 for t = 0.

    Attributes:
        kind: "constant": 1. "polynomial": `(t + 1) ** -a`. "hinge": 1 up to `b`, then `1 / (a (t - b) + 1)`.
        a: how fast it falls, 0 or more.
        b: of "hinge", 0 or more.

    Raises:
        ValueError: an unknown kind, or a number out of range.
    """

    kind: Literal["constant", "polynomial", "hinge"] = "polynomial"
    a: float = 0.5
    b: float = 4.0

    def __post_init__(self) -> None:
        if self.kind not in ("constant", "polynomial", "hinge"):
            raise ValueError(f"staleness must be constant, polynomial or hinge; got {self.kind!r}")
        for name, value in (("a", self.a), ("b", self.b)):
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"staleness {name} must be a finite number from 0 on; got {value}")

    def weight(self, staleness: int) -> float:
        """The factor for an update of this staleness."""
        if self.kind == "constant":
            return 1.0
        if self.kind == "polynomial":
            return float((staleness + 1) ** -self.a)
        return 1.0 if staleness <= self.b else 1.0 / (self.a * (staleness - self.b) + 1.0)
