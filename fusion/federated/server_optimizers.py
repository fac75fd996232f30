"""What a server makes of the average change of its clients.

`delta` is the average of trained minus sent parameters, so it points downhill; a
server optimizer adds what it makes of it, in place. Every rank runs its own on the
same bits, so all ranks stay the same. FedAvg: McMahan et al., AISTATS 2017. FedAvgM:
Hsu, Qi and Brown, arXiv 1909.06335. FedAdagrad, FedYogi and FedAdam: Reddi et al.,
"Adaptive federated optimization", ICLR 2021, Algorithm 2, which corrects no bias and
starts `v` at `tau ** 2`.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor


class ServerOptimizer(Protocol):
    """Updates the parameters of the server, once a round."""

    def step(self, values: Tensor, delta: Tensor) -> None:
        """Change `values` in place; both 1-D, of one dtype and length."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What must be kept to go on later."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that was kept."""
        ...


class FedAvg:
    """`w += lr * delta`; with `lr=1` plain federated averaging. Cost: no state.

    Raises:
        ValueError: `lr` is not positive.
    """

    def __init__(self, lr: float = 1.0) -> None:
        self.lr = _positive("lr", lr)

    def step(self, values: Tensor, delta: Tensor) -> None:
        """See `ServerOptimizer`."""
        values.add_(delta, alpha=self.lr)

    def state_dict(self) -> dict[str, Any]:
        """Empty."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Accept an empty state."""
        _require_keys(state, set())


class FedAvgM:
    """Server momentum: `v = momentum * v + delta; w += lr * v`. Cost: one vector.

    Raises:
        ValueError: `lr` is not positive, or `momentum` not in [0, 1).
    """

    def __init__(self, lr: float = 1.0, momentum: float = 0.9) -> None:
        self.lr = _positive("lr", lr)
        self.momentum = _share("momentum", momentum)
        self._velocity: Tensor | None = None

    def step(self, values: Tensor, delta: Tensor) -> None:
        """See `ServerOptimizer`."""
        if self._velocity is None:
            self._velocity = torch.zeros_like(values)
        self._velocity.mul_(self.momentum).add_(delta)
        values.add_(self._velocity, alpha=self.lr)

    def state_dict(self) -> dict[str, Any]:
        """The velocity."""
        return {"velocity": self._velocity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `ServerOptimizer`."""
        _require_keys(state, {"velocity"})
        self._velocity = _copy(state["velocity"])


class _Adaptive:
    """`m = beta1 m + (1 - beta1) delta; w += lr m / (sqrt(v) + tau)`; the methods differ in `v`.

    Cost: two vectors.
    """

    def __init__(self, lr: float = 0.1, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> None:
        self.lr = _positive("lr", lr)
        self.beta1 = _share("beta1", beta1)
        self.beta2 = _share("beta2", beta2)
        self.tau = _positive("tau", tau)
        self._mean: Tensor | None = None
        self._square: Tensor | None = None

    def step(self, values: Tensor, delta: Tensor) -> None:
        """See `ServerOptimizer`."""
        if self._mean is None or self._square is None:
            self._mean = torch.zeros_like(values)
            self._square = torch.full_like(values, self.tau**2)
        self._mean.mul_(self.beta1).add_(delta, alpha=1 - self.beta1)
        self._accumulate(self._square, delta.square())
        values.addcdiv_(self._mean, self._square.sqrt().add_(self.tau), value=self.lr)

    def _accumulate(self, square: Tensor, new: Tensor) -> None:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """The two moments."""
        return {"mean": self._mean, "square": self._square}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `ServerOptimizer`."""
        _require_keys(state, {"mean", "square"})
        self._mean, self._square = _copy(state["mean"]), _copy(state["square"])


class FedAdam(_Adaptive):
    """`v = beta2 v + (1 - beta2) delta^2`.

    Args:
        lr, beta1, beta2, tau: as in the paper, where `lr` is eta; `tau` is the degree of adaptivity.

    Raises:
        ValueError: `lr` or `tau` is not positive, or a beta not in [0, 1).
    """

    def _accumulate(self, square: Tensor, new: Tensor) -> None:
        square.mul_(self.beta2).add_(new, alpha=1 - self.beta2)


class FedYogi(_Adaptive):
    """`v = v - (1 - beta2) delta^2 sign(v - delta^2)`; parameters as for `FedAdam`."""

    def _accumulate(self, square: Tensor, new: Tensor) -> None:
        square.addcmul_(new, torch.sign(square - new), value=-(1 - self.beta2))


class FedAdagrad(_Adaptive):
    """`v = v + delta^2`; no momentum unless `beta1` is given; there is no `beta2`.

    Raises:
        ValueError: `lr` or `tau` is not positive, or `beta1` not in [0, 1).
    """

    def __init__(self, lr: float = 0.1, beta1: float = 0.0, tau: float = 1e-3) -> None:
        super().__init__(lr, beta1, 0.0, tau)

    def _accumulate(self, square: Tensor, new: Tensor) -> None:
        square.add_(new)


def _positive(name: str, value: float) -> float:
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} must be a finite number above 0; got {value}")
    return float(value)


def _share(name: str, value: float) -> float:
    if not math.isfinite(value) or not 0 <= value < 1:
        raise ValueError(f"{name} must be from 0 to below 1; got {value}")
    return float(value)


def _copy(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.clone()


def _require_keys(state: dict[str, Any], keys: set[str]) -> None:
    if set(state) != keys:
        raise ValueError(
            f"this state of a server optimizer has {sorted(state)}, but {sorted(keys)} is needed: "
            "it was saved by another kind of optimizer"
        )
