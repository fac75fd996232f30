"""Small models, data that differs from rank to rank, and what one process would have computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

both = pytest.mark.parametrize("buckets", ["dynamic", "static"])
"""Both kinds of buckets."""

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def plain_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def net() -> nn.Sequential:
    """The same weights at every call."""
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4), nn.Linear(4, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return model


def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """On data of one step and rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs, targets = torch.randn(5, 6, generator=generator), torch.randn(5, 2, generator=generator)
    return ((model(inputs) - targets) ** 2).mean()


def total_loss(model: nn.Module, step: int, size: int) -> torch.Tensor:
    return sum((loss(model, step, rank) for rank in range(size)), torch.tensor(0.0))


def trained_alone(size: int, steps: Iterable[int], make: MakeOptimizer = sgd) -> nn.Module:
    """What training on the data of all ranks in one process gives."""
    model = net()
    optimizer = make(model.parameters())
    for step in steps:
        optimizer.zero_grad()
        (total_loss(model, step, size) / size).backward()
        optimizer.step()
    return model


def assert_close(model: nn.Module, other: nn.Module, tolerance: float = 1e-5) -> None:
    for (name, value), (_, expected) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.allclose(value, expected, atol=tolerance), f"{name}: {value} is not {expected}"


def assert_same_on_all_ranks(hvd: ModuleType, model: nn.Module) -> None:
    """The same bits, not only close values."""
    for name, value in model.named_parameters():
        mine = torch.view_as_real(value.detach()) if value.is_complex() else value.detach()
        assert torch.equal(mine, hvd.broadcast(mine, 0)), f"{name} differs between ranks"


def train(optimizer: Any, model: nn.Module, steps: Iterable[int], rank: int) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss(model, step, rank).backward()
        optimizer.step()
