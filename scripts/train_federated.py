"""Federated training on scikit-learn's handwritten digits: rounds against asynchronous updates.

    mpirun -np 4 python scripts/train_federated.py
    fusion run -np 4 scripts/train_federated.py --config configs/federated.yaml --json federated.json

The images are split over simulated clients so that each has its own mixture of digits.
Every run of the settings starts from the same model and lasts until the global model
tells the wanted share of the test images apart; the table shows how long that took.
Slower devices are simulated by sleeping in proportion to what they compute. Exits with
1 if a run did not get there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

import fusion.federated as fed
import fusion.torch as hvd
from fusion.federated.settings import FederatedSettings, Run, Sync, load

ROOT = Path(__file__).resolve().parents[1]


class Split(NamedTuple):
    images: Tensor
    labels: Tensor


class Outcome(NamedTuple):
    """What one training gave; the same on every rank."""

    seconds: float | None
    """Until the accuracy was reached; None if it was not."""
    accuracy: float
    models: int
    """Rounds, or models that the server made."""
    updates: int
    rejected: int
    megabytes: float
    """Of clients' updates, as they travel."""
    mean_staleness: float
    max_staleness: int
    curve: list[tuple[float, float]]
    """Seconds and accuracy."""


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Federated training on the digits, in rounds and asynchronously."
    )
    parser.add_argument("--config", default=str(ROOT / "configs" / "federated.yaml"))
    parser.add_argument("--json", help="a file for the results")
    parser.add_argument("--only", action="append", help="name of a run; may be given several times")
    return parser.parse_args()


def digits(settings: FederatedSettings, seed: int) -> tuple[Split, Split]:
    """The training and the test set, the same on every rank."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(found.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    count = round(settings.data.test_share * len(labels))
    test, train = order[:count], order[count:]
    return Split(images[train], labels[train]), Split(images[test], labels[test])


def network(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )


def hosted(settings: FederatedSettings, train: Split, seed: int) -> list[fed.Client]:
    """This rank's clients: every size-th of all."""
    parts = fed.dirichlet_split(train.labels, settings.data.clients, settings.data.alpha, seed=seed)
    devices = settings.devices
    return [
        fed.Client(
            number,
            (train.images[part], train.labels[part]),
            slowness=devices.slowness * devices.slower.get(number, 1.0),
            dropout=devices.dropout,
        )
        for number, part in enumerate(parts)
        if number % hvd.size() == hvd.rank()
    ]


def training(settings: FederatedSettings) -> fed.LocalTraining:
    chosen = settings.training
    return fed.LocalTraining(
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=chosen.lr, momentum=chosen.momentum),
        epochs=chosen.epochs,
        batch_size=chosen.batch_size,
        proximal=chosen.proximal,
    )


class Meter:
    """Looks at the model now and then, and says when it is good enough."""

    def __init__(self, test: Split, settings: FederatedSettings) -> None:
        self._test, self._goal = test, settings.goal
        self._began = time.monotonic()
        self.curve: list[tuple[float, float]] = []

    @torch.no_grad()
    def __call__(self, model: nn.Module, _progress: object = None) -> bool:
        model.eval()
        accuracy = (model(self._test.images).argmax(1) == self._test.labels).double().mean().item()
        self.curve.append((time.monotonic() - self._began, accuracy))
        return self.reached or self.curve[-1][0] > self._goal.seconds

    @property
    def reached(self) -> bool:
        return bool(self.curve) and self.curve[-1][1] >= self._goal.accuracy


def in_rounds(run: Sync, settings: FederatedSettings, seed: int, parts: tuple[Any, ...]) -> Outcome:
    model, clients, meter = parts
    federation = fed.FederatedAveraging(
        model,
        clients,
        training(settings),
        server=run.build(),
        fraction=run.fraction,
        compression=run.compression,
        seed=seed,
        # A device computes whatever the others do, so the clients of a rank train at the same time.
        threads=max(1, len(clients)),
    )
    meter = Meter(*meter)
    reports = []
    done = False
    while not done:
        reports.append(federation.round())
        done = hvd.broadcast_object(meter(model), 0)
    return Outcome(
        seconds=meter.curve[-1][0] if meter.reached else None,
        accuracy=meter.curve[-1][1],
        models=len(reports),
        updates=sum(len(report.answered) for report in reports),
        rejected=0,
        megabytes=sum(report.payload_bytes for report in reports) / 1e6,
        mean_staleness=0.0,
        max_staleness=0,
        curve=meter.curve,
    )


def asynchronously(run: Run, settings: FederatedSettings, seed: int, parts: tuple[Any, ...]) -> Outcome:
    model, clients, meter = parts
    federation = fed.AsyncFederation(
        model,
        clients,
        training(settings),
        rule=run.build(),
        max_staleness=run.max_staleness,
        concurrency=run.concurrency,
        compression=run.compression,
        seed=seed,
    )
    meter = Meter(*meter)
    report = federation.run(seconds=settings.goal.seconds, watch=meter)
    return Outcome(
        seconds=meter.curve[-1][0] if meter.reached else None,
        accuracy=meter.curve[-1][1] if meter.curve else 0.0,
        models=report.versions,
        updates=sum(report.updates.values()),
        rejected=sum(report.rejected.values()),
        megabytes=report.update_bytes / 1e6,
        mean_staleness=report.mean_staleness,
        max_staleness=report.max_staleness,
        curve=meter.curve,
    )


def train(run: Run, settings: FederatedSettings, seed: int) -> Outcome:
    """One training, from the same beginning as every other of this seed."""
    train_set, test_set = digits(settings, seed)
    parts = network(seed), hosted(settings, train_set, seed), (test_set, settings)
    outcome = (in_rounds if isinstance(run, Sync) else asynchronously)(run, settings, seed, parts)
    agreed: Outcome = hvd.broadcast_object(outcome, 0)
    return agreed


def table(outcomes: dict[str, list[Outcome]], settings: FederatedSettings) -> Table:
    """Medians over seeds."""
    goal = settings.goal
    where = f"{settings.data.clients} clients on {hvd.size()} ranks"
    rows = Table(title=f"{where}: time to {goal.accuracy:.0%} of the test images")
    for heading in ("run", "seconds", "speed-up", "models", "updates", "rejected", "MB up", "staleness"):
        rows.add_column(heading, justify="left" if heading == "run" else "right")
    first = None
    for name, its in outcomes.items():
        times = [outcome.seconds for outcome in its if outcome.seconds is not None]
        median = statistics.median(times) if len(times) == len(its) else None
        first = first or median
        rows.add_row(
            name,
            f"not in {goal.seconds:g}" if median is None else f"{median:.2f}",
            f"{first / median:.1f}" if first and median else "-",
            f"{statistics.median(outcome.models for outcome in its):g}",
            f"{statistics.median(outcome.updates for outcome in its):g}",
            f"{statistics.median(outcome.rejected for outcome in its):g}",
            f"{statistics.median(outcome.megabytes for outcome in its):.2f}",
            f"{statistics.median(outcome.mean_staleness for outcome in its):.1f}"
            f" (max {max(outcome.max_staleness for outcome in its)})",
        )
    return rows


def main() -> int:
    asked = options()
    torch.set_num_threads(1)
    settings = load(asked.config)
    runs = [run for run in settings.runs if not asked.only or run.name in asked.only]
    if not runs:
        raise SystemExit(f"--only: there are the runs {[run.name for run in settings.runs]}")
    hvd.init()
    outcomes = {run.name: [train(run, settings, seed) for seed in settings.seeds] for run in runs}
    if hvd.rank() == 0:
        Console(width=110).print(table(outcomes, settings))
        if asked.json:
            results = {name: [outcome._asdict() for outcome in its] for name, its in outcomes.items()}
            about = {"ranks": hvd.size(), "config": Path(asked.config).name, "seeds": settings.seeds}
            Path(asked.json).write_text(json.dumps({**about, "runs": results}, indent=1))
    reached = all(outcome.seconds is not None for its in outcomes.values() for outcome in its)
    hvd.shutdown()
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
