"""Train a small network on scikit-learn's handwritten digits, sharded over the ranks.

    mpirun -np 2 python scripts/train_digits.py
    fusion run -np 2 --config configs/default.yaml scripts/train_digits.py

Every rank sees its share of the images; gradients are averaged while the backward
pass goes on. At the end rank 0 prints what the runtime did, and all ranks compare
a digest of their parameters. Exits with 1 if fewer than 95 % of the test images
are told apart, or if the ranks do not hold the same parameters.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

import fusion.torch as hvd
from coordinator.stats import Stats

WANTED_ACCURACY = 0.95
TEST_SHARE = 5


class Split(NamedTuple):
    images: Tensor
    labels: Tensor


class Result(NamedTuple):
    loss: float
    accuracy: float


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on the digits set, in parallel.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument(
        "--batch-size", type=int, default=64, help="images of one step, on all ranks together"
    )
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--buckets", choices=["dynamic", "static"], help="default: as configured")
    parser.add_argument("--config", help="a YAML file with settings of the runtime")
    return parser.parse_args()


def load(seed: int) -> tuple[Split, Split]:
    """The training and the test set, the same on every rank."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    test, train = order[: len(order) // TEST_SHARE], order[len(order) // TEST_SHARE :]
    return Split(images[train], labels[train]), Split(images[test], labels[test])


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def batches(train: Split, batch_size: int, seed: int) -> Iterator[Split]:
    """This rank's share of each step's images; every rank gets the same number of steps."""
    order = torch.randperm(len(train.labels), generator=torch.Generator().manual_seed(seed))
    whole = len(order) // batch_size * batch_size
    for step in order[:whole].split(batch_size):
        mine = step[hvd.rank() :: hvd.size()]
        yield Split(train.images[mine], train.labels[mine])


@torch.no_grad()
def evaluate(model: nn.Module, test: Split) -> Result:
    """Over the whole test set, of which each rank looks at its share."""
    images, labels = (part[hvd.rank() :: hvd.size()] for part in test)
    scores = model(images)
    loss = functional.cross_entropy(scores, labels, reduction="sum").double()
    right = (scores.argmax(1) == labels).sum().double()
    totals = hvd.allreduce(torch.stack([loss, right]), name="evaluation", op=hvd.Sum)
    loss_mean, accuracy = (totals / len(test.labels)).tolist()
    return Result(loss_mean, accuracy)


class Bar:
    """A progress bar on rank 0.

    Each state is a line of its own: mpirun passes lines on, so a bar that moves
    the cursor would be mixed with what other ranks print, and fill a log file
    with escape codes.
    """

    def __init__(self, console: Console, epochs: int) -> None:
        self._console = console
        columns = (TextColumn("epoch"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[note]}"))
        self._progress = Progress(*columns, console=console, auto_refresh=False)
        self._task = self._progress.add_task("", total=epochs, note="")

    def advance(self, result: Result) -> None:
        note = f"loss {result.loss:.3f}  accuracy {result.accuracy:.1%}"
        self._progress.update(self._task, advance=1, note=note)
        if hvd.rank() == 0:
            self._console.print(self._progress.get_renderable())


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterator[Split]) -> None:
    for images, labels in steps:
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()


def digest(model: nn.Module) -> str:
    """Of every bit of the parameters."""
    total = hashlib.sha256()
    for parameter in model.state_dict().values():
        total.update(parameter.contiguous().numpy().tobytes())
    return total.hexdigest()


def table(result: Result, did: Stats) -> Table:
    """What came out, and what the runtime did for it on this rank."""
    rows = Table(title=f"digits on {hvd.size()} ranks", show_header=False)
    for name, value in (
        ("test loss", f"{result.loss:.4f}"),
        ("test accuracy", f"{result.accuracy:.2%}"),
        ("tensors reduced", f"{did.reduced_tensors:,}"),
        ("bytes reduced", f"{did.reduced_bytes:,}"),
        ("fused buffers", f"{did.buffers:,}"),
        ("mean tensors per buffer", f"{did.mean_tensors_per_buffer:.2f}"),
        ("cycles", f"{did.cycles:,}"),
        ("negotiate", f"{did.negotiate_s:.3f} s"),
        ("pack", f"{did.pack_s:.3f} s"),
        ("reduce", f"{did.reduce_s:.3f} s"),
        ("unpack", f"{did.unpack_s:.3f} s"),
    ):
        rows.add_row(name, value)
    return rows


def prepare(asked: argparse.Namespace) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer that start out the same on every rank."""
    torch.manual_seed(asked.seed + hvd.rank())
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=asked.lr, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(inner, root_rank=0)
    choice = {} if asked.buckets is None else {"buckets": asked.buckets}
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters(), **choice)
    return model, optimizer


def train(asked: argparse.Namespace, console: Console) -> tuple[nn.Module, Result]:
    train_set, test_set = load(asked.seed)
    model, optimizer = prepare(asked)
    result = evaluate(model, test_set)
    bar = Bar(console, asked.epochs)
    for epoch in range(asked.epochs):
        train_epoch(model, optimizer, batches(train_set, asked.batch_size, asked.seed + epoch))
        result = evaluate(model, test_set)
        bar.advance(result)
    return model, result


def main() -> int:
    asked = options()
    torch.set_num_threads(1)
    hvd.init(asked.config)
    console = Console(width=80)
    before = hvd.stats()
    model, result = train(asked, console)
    did = hvd.stats().since(before)
    digests = hvd.allgather_object(digest(model))
    alike = len(set(digests)) == 1
    if hvd.rank() == 0:
        console.print(table(result, did))
        if alike:
            console.print(
                f"all {hvd.size()} ranks hold bit-identical parameters: sha256 {digests[0][:16]}..."
            )
        else:
            console.print("the ranks hold different parameters:", *digests)
        if result.accuracy < WANTED_ACCURACY:
            console.print(f"the test accuracy is below {WANTED_ACCURACY:.0%}")
    hvd.shutdown()
    return 0 if alike and result.accuracy >= WANTED_ACCURACY else 1


if __name__ == "__main__":
    sys.exit(main())
