"""Server optimizers follow the formulas of their papers, written out number by number."""

from __future__ import annotations

import math

import pytest
import torch

from fusion.federated import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedYogi

DELTAS = [0.5, -0.25, 0.125]


def run(optimizer, deltas=DELTAS) -> float:
    values = torch.tensor([1.0], dtype=torch.float64)
    for delta in deltas:
        optimizer.step(values, torch.tensor([delta], dtype=torch.float64))
    return values.item()


def adaptive(square, lr=0.1, beta1=0.9, tau=1e-3) -> float:
    """Reddi et al., Algorithm 2, with the line that differs as a function of v and delta."""
    w, m, v = 1.0, 0.0, tau**2
    for delta in DELTAS:
        m = beta1 * m + (1 - beta1) * delta
        v = square(v, delta * delta)
        w += lr * m / (math.sqrt(v) + tau)
    return w


def test_plain_averaging_adds_the_change() -> None:
    assert run(FedAvg()) == 1.375
    assert run(FedAvg(lr=0.5)) == 1.1875


def test_momentum_is_summed_up() -> None:
    assert run(FedAvgM(lr=1.0, momentum=0.5)) == 1 + 0.5 + 0.0 + 0.125


def test_adam() -> None:
    assert run(FedAdam()) == pytest.approx(adaptive(lambda v, d: 0.99 * v + 0.01 * d), rel=1e-12)


def test_yogi() -> None:
    def square(v: float, d: float) -> float:
        return v - 0.01 * d * math.copysign(1.0, v - d)

    assert run(FedYogi()) == pytest.approx(adaptive(square), rel=1e-12)


def test_adagrad() -> None:
    assert run(FedAdagrad()) == pytest.approx(adaptive(lambda v, d: v + d, beta1=0.0), rel=1e-12)


@pytest.mark.parametrize("make", [FedAvg, FedAvgM, FedAdam, FedYogi, FedAdagrad])
def test_a_restored_state_goes_on_as_if_nothing_had_happened(make) -> None:
    whole, first, second = make(), make(), make()
    values = torch.tensor([1.0], dtype=torch.float64)
    changes = [torch.tensor([delta], dtype=torch.float64) for delta in DELTAS]
    first.step(values, changes[0])
    second.load_state_dict(first.state_dict())
    for change in changes[1:]:
        second.step(values, change)
    assert values.item() == run(whole)


def test_the_state_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="another kind of optimizer"):
        FedAdam().load_state_dict(FedAvgM().state_dict())


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (FedAvg, {"lr": 0.0}),
        (FedAvg, {"lr": float("nan")}),
        (FedAvgM, {"momentum": 1.0}),
        (FedAdam, {"beta2": -0.1}),
        (FedYogi, {"tau": 0.0}),
        (FedAdagrad, {"beta1": 2.0}),
    ],
)
def test_numbers_out_of_range_are_refused(make, wrong) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        make(**wrong)
