"""What every compressor does to training a convolutional network and a small transformer.

    mpirun -np 2 python scripts/compare_compression.py --json docs/compression.json
    python scripts/compare_compression.py --plot docs/compression.json docs/compression.png

Each method runs with and without error feedback, over several seeds, on the handwritten digits
(scikit-learn's) and on text of the standard library (its documentation topics), character by
character. Everything but the method is the same: weights, order of the data, learning rate, steps.
Ratios are measured by the runtime, in bytes: of the buckets that were compressed, and of all gradients,
with those that stay dense. A run that is in the JSON file already is not repeated.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

METHODS = {
    "none": ("off",),
    "fp16": ("off", "on"),
    "bf16": ("off", "on"),
    "int8": ("off", "on"),
    "terngrad": ("off", "on"),
    "onebit": ("off", "on"),
    "topk:0.01": ("off", "on"),
    "topk:0.01 after 50": ("off", "on"),
    "topk:0.0005": ("off", "on"),
    "randomk:0.01": ("off", "on"),
    "powersgd:4": ("off", "on"),
    "powersgd:1": ("off", "on"),
}
"""Each method, after how many steps it begins, and whether it runs with error feedback."""


class Task(NamedTuple):
    """A model and its data: batches of one rank, and the loss and accuracy on data that was held back."""

    model: nn.Module
    batches: Callable[[int, int, int], Iterator[tuple[Tensor, Tensor]]]
    loss: Callable[[Tensor, Tensor], Tensor]
    held_back: tuple[Tensor, Tensor]
    lr: float


def digits(seed: int) -> Task:
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    test, train = order[:360], order[360:]
    torch.manual_seed(seed)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(32 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10)),
    )

    def batches(steps: int, rank: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            chosen = train[torch.randint(len(train), (32,), generator=generator)][rank::size]
            yield images[chosen], labels[chosen]

    return Task(model, batches, functional.cross_entropy, (images[test], labels[test]), lr=0.02)


class CharacterModel(nn.Module):
    """A decoder of two layers."""

    def __init__(self, symbols: int, context: int, width: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(symbols, width)
        self.position = nn.Parameter(torch.randn(context, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))

    def forward(self, symbols: Tensor) -> Tensor:
        hidden = self.embed(symbols) + self.position
        return self.head(self.norm(self.layers(hidden, mask=self.mask, is_causal=True)))


def characters(seed: int, context: int = 24) -> Task:
    from pydoc_data.topics import topics

    text = "\n".join(topics[key] for key in sorted(topics))
    alphabet = {symbol: number for number, symbol in enumerate(sorted(set(text)))}
    symbols = torch.tensor([alphabet[symbol] for symbol in text])
    train, test = symbols[: -len(symbols) // 10], symbols[-len(symbols) // 10 :]
    torch.manual_seed(seed)
    model = CharacterModel(len(alphabet), context)

    def pairs(data: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        windows = data[starts[:, None] + torch.arange(context + 1)]
        return windows[:, :-1], windows[:, 1:]

    def batches(steps: int, rank: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            starts = torch.randint(len(train) - context - 1, (24,), generator=generator)
            yield pairs(train, starts[rank::size])

    held_back = pairs(test, torch.arange(0, len(test) - context - 1, (len(test) - context - 1) // 400))
    return Task(model, batches, _per_symbol, held_back, lr=0.1)


def _per_symbol(scores: Tensor, wanted: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), wanted.flatten())


TASKS = {"digits": digits, "characters": characters}


def run(task_name: str, method: str, feedback: str, seed: int, steps: int) -> dict[str, Any]:
    """Train once; collective."""
    import fusion.torch as hvd
    from fusion.compression import Policy, parse, with_feedback

    spec, _, warmup = method.partition(" after ")
    task = TASKS[task_name](seed)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(task.model.parameters(), lr=task.lr, momentum=0.9),
        task.model.named_parameters(),
        compression=Policy(with_feedback(parse(spec), feedback == "on"), warmup_steps=int(warmup or 0)),
    )
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 2 * (1 - step / steps)))
    before, start = hvd.stats(), time.perf_counter()
    for inputs, wanted in task.batches(steps, hvd.rank(), hvd.size()):
        optimizer.zero_grad()
        task.loss(task.model(inputs), wanted).backward()
        optimizer.step()
        rate.step()
    seconds = time.perf_counter() - start
    moved = hvd.stats().since(before)
    bucket_ratio = moved.compressed_bytes / moved.payload_bytes if moved.payload_bytes else 1.0
    task.model.eval()
    with torch.no_grad():
        inputs, wanted = task.held_back
        scores = task.model(inputs)
        loss = float(task.loss(scores, wanted))
        accuracy = float((scores.argmax(-1) == wanted).float().mean())
    return {
        "task": task_name,
        "method": method,
        "feedback": feedback,
        "seed": seed,
        "ranks": hvd.size(),
        "steps": steps,
        "loss": loss,
        "accuracy": accuracy,
        "ratio": moved.compression_ratio,
        "bucket_ratio": bucket_ratio,
        "seconds": seconds,
    }


def study(options: argparse.Namespace) -> None:
    """All runs that are not in the file yet."""
    import fusion.torch as hvd

    hvd.init()
    done: list[dict[str, Any]] = hvd.broadcast_object(_read(options.json))
    known = {(each["task"], each["method"], each["feedback"], each["seed"]) for each in done}
    for seed in range(options.seeds):
        for task_name in options.tasks:
            for method in options.methods:
                for feedback in METHODS.get(method, ("off", "on")):
                    if (task_name, method, feedback, seed) in known:
                        continue
                    steps = options.steps[list(TASKS).index(task_name)]
                    result = run(task_name, method, feedback, seed, steps)
                    done.append(result)
                    if hvd.rank() == 0:
                        options.json.write_text(json.dumps(done, indent=1) + "\n")
                        print(_line([result]), flush=True)
    hvd.shutdown()


def _read(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text()) if path.exists() else []


def _line(runs: list[dict[str, Any]]) -> str:
    """One line of the table: means over seeds, and their spread."""
    first = runs[0]
    accuracies, losses = [100 * each["accuracy"] for each in runs], [each["loss"] for each in runs]
    spread = f" ± {stdev(accuracies):.1f}" if len(runs) > 1 else ""
    return (
        f"| {first['task']} | {first['method']} | {first['feedback']} | {first['bucket_ratio']:.4g}x | "
        f"{first['ratio']:.4g}x | {mean(losses):.3f} | {mean(accuracies):.1f}{spread} |"
    )


def grouped(runs: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The runs that differ only in their seed together, in the order of `METHODS`."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for each in runs:
        groups.setdefault((each["task"], each["method"], each["feedback"]), []).append(each)
    order = list(METHODS)
    return [groups[key] for key in sorted(groups, key=lambda key: (key[0], order.index(key[1]), key[2]))]


def table(runs: list[dict[str, Any]]) -> str:
    """The table of docs/compression.md."""
    head = [
        "| task | method | feedback | ratio | with dense | loss | accuracy % |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *map(_line, grouped(runs))])


def _accuracy(group: list[dict[str, Any]]) -> float:
    return mean(100 * each["accuracy"] for each in group)


def plot(runs: list[dict[str, Any]], path: str) -> None:
    """Accuracy against ratio, with and without feedback."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(TASKS), figsize=(11, 4.2), layout="constrained")
    for axis, task_name in zip(axes, TASKS, strict=True):
        groups = [group for group in grouped(runs) if group[0]["task"] == task_name]
        best = max(_accuracy(group) for group in groups)
        for group in groups:
            first = group[0]
            # What failed altogether is shown at the lower edge, so that the others can be told apart.
            place = (first["bucket_ratio"], max(_accuracy(group), 0.8 * best))
            color, marker = ("C0", "o") if first["feedback"] == "on" else ("C3", "x")
            axis.plot(*([value] for value in place), linestyle="none", color=color, marker=marker)
            if first["feedback"] == METHODS[first["method"]][-1]:
                axis.annotate(
                    first["method"],
                    (place[0], best),
                    fontsize=7,
                    rotation=60,
                    xytext=(0, 7),
                    textcoords="offset points",
                )
        axis.set_ylim(0.79 * best, 1.045 * best)
        axis.set(xscale="log", xlabel="bytes of a bucket / bytes sent", ylabel="accuracy %")
        axis.set_title(task_name, pad=24)
        axis.grid(visible=True, alpha=0.3)
    axes[0].plot([], [], "o", color="C0", label="with error feedback")
    axes[0].plot([], [], "x", color="C3", label="without")
    axes[0].legend(loc="lower left", fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="What every compressor does to training.")
    parser.add_argument("--json", type=Path, default=Path("compression.json"), help="results, added to")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, nargs=2, default=(400, 400), help="of each task")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=TASKS)
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--plot", nargs=2, metavar=("JSON", "IMAGE"), help="only print the table and draw")
    options = parser.parse_args()
    if options.plot:
        runs = _read(Path(options.plot[0]))
        plot(runs, options.plot[1])
        print(table(runs))
    else:
        torch.set_num_threads(1)
        study(options)


if __name__ == "__main__":
    main()
