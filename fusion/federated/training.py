"""What a client does with the model it was sent: local epochs of a plain optimizer.

Runs on whichever thread trains the client; holds no state, so clients on several
threads may share one `LocalTraining`. FedProx: Li et al., "Federated optimization in
heterogeneous networks", MLSys 2020.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor, nn

from fusion.federated.clients import Client


class Stopped(Exception):  # noqa: N818, it is an event, not an error
    """The training was told to stop before its end."""


class LocalTraining(Struct, frozen=True, kw_only=True):
    """How every client trains.

    Attributes:
        loss: `loss(model, batch)`, a scalar to minimise; the mean over the batch. A batch is
            what `Client.batches` gives: a tuple of tensors, or what a dataset collates to.
        optimizer: makes an optimizer of parameters, anew for each round of each client.
        epochs: how often a client goes through its data.
        batch_size: examples of one step.
        drop_last: leave out a last batch that is smaller, unless it is the only one: batch
            normalization cannot train on a single example.
        proximal: FedProx's mu: `mu / 2 * |w - w_sent|^2` is added to the loss; 0 for none.

    Raises:
        ValueError: a number out of range.
    """

    loss: Callable[[nn.Module, Any], Tensor]
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer]
    epochs: int = 1
    batch_size: int = 32
    drop_last: bool = False
    proximal: float = 0.0

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch_size < 1:
            raise ValueError(
                f"epochs and batch_size must be 1 or more; got {self.epochs} and {self.batch_size}"
            )
        if not math.isfinite(self.proximal) or self.proximal < 0:
            raise ValueError(f"proximal must be a finite number from 0 on; got {self.proximal}")

    def train(
        self,
        model: nn.Module,
        client: Client,
        generator: torch.Generator,
        stop: threading.Event | None = None,
    ) -> float:
        """Train the model on the client's data, in place.

        Args:
            generator: orders the examples.
            stop: ends the training early when it is set.

        Returns:
            The mean loss over all steps, without the proximal term.

        Raises:
            Stopped: `stop` was set.
        """
        model.train()
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        sent = [parameter.detach().clone() for parameter in parameters] if self.proximal else []
        optimizer = self.optimizer(parameters)
        total, steps = torch.zeros((), dtype=torch.float64), 0
        for _ in range(self.epochs):
            for batch in client.batches(self.batch_size, generator, drop_last=self.drop_last):
                began = time.thread_time()
                optimizer.zero_grad()
                loss = self.loss(model, batch)
                loss.backward()
                if sent:
                    self._pull(parameters, sent)
                optimizer.step()
                total += loss.detach()
                steps += 1
                _rest((client.slowness - 1) * (time.thread_time() - began), stop)
        return float(total / max(1, steps))

    @torch.no_grad()
    def _pull(self, parameters: list[nn.Parameter], sent: list[Tensor]) -> None:
        """Add the gradient of the proximal term."""
        for parameter, start in zip(parameters, sent, strict=True):
            pull = parameter - start
            if parameter.grad is None:
                parameter.grad = self.proximal * pull
            else:
                parameter.grad.add_(pull, alpha=self.proximal)


def _rest(seconds: float, stop: threading.Event | None) -> None:
    """Sleep as long as a slower device would still compute; `stop` ends the sleep."""
    if stop is not None:
        if stop.wait(seconds) if seconds > 0 else stop.is_set():
            raise Stopped
    elif seconds > 0:
        time.sleep(seconds)
