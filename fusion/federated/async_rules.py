"""What a server makes of single updates: FedAsync mixes each one in, FedBuff waits for a few.

Rules change no tensor they are given: a model that was sent is still needed. Called
on the server's thread.

FedAsync: Xie, Koyejo and Gupta, arXiv 1903.03934, Algorithm 1. FedBuff: Nguyen et al.,
"Federated learning with buffered asynchronous aggregation", AISTATS 2022, Algorithm 1.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch

from fusion.federated.server_optimizers import FedAvg, ServerOptimizer
from fusion.federated.staleness import Staleness
from fusion.federated.vector import ModelState


class AsyncRule(Protocol):
    """Absorbs one update after the other."""

    def absorb(
        self, state: ModelState, base: ModelState, change: ModelState, staleness: int, trained: int
    ) -> ModelState | None:
        """Take an update.

        Args:
            state: the server's model.
            base: the model that the update started from.
            change: see `workbench.Update`.
            staleness: of the update.
            trained: how many of the values are parameters.

        Returns:
            A new model, or None as long as there is none.
        """
        ...


class FedAsync:
    """`w = (1 - a) w + a w_client`, where `a = mixing * weight(staleness)`.

    Args:
        mixing: the paper's alpha, above 0 and at most 1.
        staleness: how `mixing` falls.

    Raises:
        ValueError: `mixing` out of range.
    """

    def __init__(self, mixing: float = 0.6, staleness: Staleness | None = None) -> None:
        if not math.isfinite(mixing) or not 0 < mixing <= 1:
            raise ValueError(f"mixing must be above 0 and at most 1; got {mixing}")
        self.mixing = float(mixing)
        self.staleness = Staleness() if staleness is None else staleness

    def absorb(
        self, state: ModelState, base: ModelState, change: ModelState, staleness: int, trained: int
    ) -> ModelState | None:
        """See `AsyncRule`; always a new model."""
        del trained
        share = self.mixing * self.staleness.weight(staleness)
        theirs = base.values + change.values
        return ModelState(
            torch.lerp(state.values, theirs, share), torch.maximum(state.counters, change.counters)
        )


class FedBuff:
    """After every `size` updates, `server.step` with `sum(weight(staleness) * change) / size`.

    As in the paper, the updates count alike, whatever number of examples they come from. Updates that
    are left in the buffer when a run ends count in the next one.

    Args:
        size: the paper's K, updates for one new model; 1 or more.
        server: what is made of the average; default `FedAvg()`.
        staleness: weights of updates; default `1 / sqrt(1 + staleness)`, as in the paper.

    Raises:
        ValueError: `size` below 1.
    """

    def __init__(
        self, size: int = 4, server: ServerOptimizer | None = None, staleness: Staleness | None = None
    ) -> None:
        if size < 1:
            raise ValueError(f"the buffer must hold 1 update or more; got {size}")
        self.size = size
        self.server: ServerOptimizer = FedAvg() if server is None else server
        self.staleness = Staleness() if staleness is None else staleness
        self._sum: ModelState | None = None
        self._count = 0

    def absorb(
        self, state: ModelState, base: ModelState, change: ModelState, staleness: int, trained: int
    ) -> ModelState | None:
        """See `AsyncRule`; a new model with every `size`-th update."""
        del base
        if self._sum is None:
            self._sum = ModelState(torch.zeros_like(state.values), state.counters.clone())
        self._sum.values.add_(change.values, alpha=self.staleness.weight(staleness) / self.size)
        torch.maximum(self._sum.counters, change.counters, out=self._sum.counters)
        self._count += 1
        if self._count < self.size:
            return None
        mean, self._sum, self._count = self._sum, None, 0
        values = state.values.clone()
        self.server.step(values[:trained], mean.values[:trained])
        values[trained:] += mean.values[trained:]
        return ModelState(values, torch.maximum(state.counters, mean.counters))
