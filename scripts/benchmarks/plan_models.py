"""Models that `plan` predicts and trains: few large gradients, many small ones, and a mixture."""

from __future__ import annotations

import torch
from torch import nn

from scripts.benchmarks.shapes import SETS

Made = tuple[nn.Module, torch.Tensor]


def wide() -> Made:
    """Twelve layers of 4 MiB, 48 MiB; computing takes about as long as reducing at 1 Gbit/s."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(12):
        layers += [nn.Linear(1024, 1024), nn.ReLU()]
    return nn.Sequential(*layers), torch.randn(320, 1024)


def deep() -> Made:
    """A hundred layers of 64 KiB, 6.4 MiB: what a message costs counts."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(100):
        layers += [nn.Linear(128, 128), nn.ReLU()]
    return nn.Sequential(*layers), torch.randn(256, 128)


class Bag(nn.Module):
    """Parameters of given shapes and next to no arithmetic: all gradients come almost at once."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.items = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        return torch.stack([(item * scale).sum() for item in self.items])


def resnet50() -> Made:
    """The gradients of ResNet-50, without its arithmetic."""
    return Bag(SETS["resnet50"]()), torch.ones(())


def tiny1000() -> Made:
    """A thousand gradients of 1 KiB."""
    return Bag(SETS["tiny1000"]()), torch.ones(())


MODELS = {"wide": wide, "deep": deep, "resnet50": resnet50, "tiny1000": tiny1000}
