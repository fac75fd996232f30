"""Where one client at a time trains: a copy of the model, and what comes of a training.

One workbench a thread. `train` never raises what the client's code raises: a
failure is an outcome like any other, because other ranks wait for word of it.
"""

from __future__ import annotations

import copy
import threading
import time
import traceback

import numpy as np
import torch
from msgspec import Struct
from torch import nn

from fusion.federated.clients import Client, ClientDropped
from fusion.federated.sampling import seed_of
from fusion.federated.training import LocalTraining, Stopped
from fusion.federated.vector import Layout, ModelState


class Update(Struct, frozen=True):
    """What a client has to tell after training.

    Attributes:
        change: trained minus sent values; its `counters` are those after training.
        seconds: that it took.
    """

    client: int
    examples: int
    change: ModelState
    loss: float
    seconds: float


class Absence(Struct, frozen=True):
    """Why there is no update of a client.

    Attributes:
        failed: its code raised or its update cannot be used; else it dropped out, or was stopped.
    """

    client: int
    reason: str
    failed: bool


class Workbench:
    """Trains clients, one after the other.

    Args:
        model: copied, so the caller's stays as it is.
        layout: of the model.
        training: what clients do.
        seed: of the whole training.
        reseed: seed torch's global generator for each client, so that dropout layers and the
            like repeat; only where a single thread trains, because that generator is shared.
    """

    def __init__(
        self, model: nn.Module, layout: Layout, training: LocalTraining, *, seed: int, reseed: bool
    ) -> None:
        self._model = copy.deepcopy(model)
        self._layout = layout
        self._training = training
        self._seed = seed
        self._reseed = reseed
        self._personal = layout.read_personal(model)

    def train(
        self, client: Client, start: ModelState, turn: int, stop: threading.Event | None = None
    ) -> Update | Absence:
        """Train a client from `start`.

        Args:
            turn: number of the round, or of the client's own training; makes its random numbers.
        """
        began = time.perf_counter()
        seed = seed_of(self._seed, turn, client.number)
        if np.random.default_rng(seed).random() < client.dropout:
            return Absence(client.number, "it dropped out", failed=False)
        try:
            self._layout.write(self._model, start)
            self._layout.write_personal(self._model, client.personal or self._personal)
            loss = self._run(client, seed, stop)
        except Stopped:
            return Absence(client.number, "it was stopped", failed=False)
        except ClientDropped as dropped:
            return Absence(client.number, str(dropped) or "it dropped out", failed=False)
        except Exception as error:  # noqa: BLE001 - whatever a client's code raises; other ranks wait for it.
            return Absence(client.number, _story(error), failed=True)
        after = self._layout.read(self._model)
        change = ModelState(after.values - start.values, after.counters)
        if not torch.isfinite(change.values).all():
            return Absence(client.number, "its update has values that are not finite", failed=True)
        client.personal = self._layout.read_personal(self._model)
        return Update(client.number, client.examples, change, loss, time.perf_counter() - began)

    def _run(self, client: Client, seed: int, stop: threading.Event | None) -> float:
        generator = torch.Generator().manual_seed(seed)
        if not self._reseed:
            return self._training.train(self._model, client, generator, stop)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self._training.train(self._model, client, generator, stop)


def _story(error: Exception) -> str:
    """The error, and the line it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"it raised {type(error).__name__}: {error}{place}"
