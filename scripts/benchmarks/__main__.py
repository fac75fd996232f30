"""The command line of `scripts/bench`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from scripts.benchmarks import launch, plots, protocol, report
from scripts.benchmarks.plan_models import MODELS as PLANNED
from scripts.benchmarks.shapes import DEFAULT_SETS, SETS

app = typer.Typer(help="Measure the runtime beside its peers.", no_args_is_help=True)
console = Console(width=None if sys.stdout.isatty() else 140)

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "performance"

ManyRanks = Annotated[list[int] | None, typer.Option("-np", "--ranks", help="Number of ranks; repeatable.")]
Ranks = Annotated[int, typer.Option("-np", "--ranks", help="Number of ranks.")]
Rounds = Annotated[int, typer.Option(help="Turns of each contestant.")]
TurnS = Annotated[float, typer.Option("--turn", help="Seconds of a turn, about.")]
Sets = Annotated[list[str] | None, typer.Option("--set", help=f"Any of {', '.join(SETS)}; repeatable.")]
Only = Annotated[list[str] | None, typer.Option(help="Contestants whose names contain this; repeatable.")]
Out = Annotated[Path, typer.Option(help="Where JSON and plots go.")]
Timeout = Annotated[float, typer.Option(help="Seconds after which a run is given up.")]

OURS = "ours, static"


@app.command()
def gradients(
    *,
    ranks: ManyRanks = None,
    only: Only = None,
    sets: Sets = None,
    rounds: Rounds = 3,
    turn: TurnS = 0.5,
    out: Out = FOLDER,
    timeout: Timeout = 600,
) -> None:
    """Sets of gradients inside one node."""
    options = {"sets": sets or list(DEFAULT_SETS), "only": only or [], "rounds": rounds, "turn_s": turn}
    runs = [launch.on_this_host("gradients", number, options, timeout) for number in ranks or [2, 4]]
    _finish_series("gradients", runs, out)


@app.command()
def latency(
    *,
    ranks: Ranks = 2,
    sizes: Annotated[list[int] | None, typer.Option("--bytes", help="Of the tensor; repeatable.")] = None,
    only: Only = None,
    rounds: Rounds = 3,
    turn: TurnS = 0.3,
    out: Out = FOLDER,
    timeout: Timeout = 600,
) -> None:
    """One tensor from submission to result."""
    options = {
        "sizes": sizes or [2**e for e in range(6, 27, 4)],
        "only": only or [],
        "rounds": rounds,
        "turn_s": turn,
    }
    runs = [launch.on_this_host("latency", ranks, options, timeout)]
    _finish_series("latency", runs, out)
    plots.over_sizes(out / "latency.png", runs[0]["results"])


@app.command()
def link(
    *,
    ranks: Ranks = 2,
    only: Only = None,
    sets: Sets = None,
    rounds: Rounds = 3,
    turn: TurnS = 0.5,
    gigabit: Annotated[bool, typer.Option(help="Limit the link to 1 Gbit/s.")] = True,
    out: Out = FOLDER,
    timeout: Timeout = 900,
) -> None:
    """Sets of gradients over two hosts and their link. Needs root."""
    options = {"sets": sets or ["resnet50", "tiny1000"], "only": only or [], "rounds": rounds, "turn_s": turn}
    runs = [launch.on_two_hosts("link", ranks, options, timeout, gigabit=gigabit)]
    _finish_series("link", runs, out)


@app.command()
def between(
    *,
    ranks: ManyRanks = None,
    sizes: Annotated[list[int] | None, typer.Option("--bytes", help="Of the payload; repeatable.")] = None,
    only: Only = None,
    rounds: Rounds = 3,
    turn: TurnS = 0.05,
    gigabit: Annotated[bool, typer.Option(help="Limit the link to 1 Gbit/s.")] = True,
    out: Out = FOLDER,
    timeout: Timeout = 300,
) -> None:
    """Ring and recursive doubling over two hosts and their link, by size. Needs root."""
    options = {
        "sizes": sizes or [2**e for e in range(6, 21, 2)],
        "only": only or [],
        "rounds": rounds,
        "turn_s": turn,
    }
    runs = [
        launch.on_two_hosts("between", number, options, timeout, gigabit=gigabit)
        for number in ranks or [2, 3, 4]
    ]
    results = [result for run in runs for result in run["results"]]
    for number in sorted({result["ranks"] for result in results}):
        rows = [
            {"work": result["work"], **{name: one["median_ms"] for name, one in result["series"].items()}}
            for result in results
            if result["ranks"] == number
        ]
        report.show_rows(console, f"{number} ranks, median ms", rows)
    _write("between", runs, out)


@app.command()
def tuning(
    *,
    ranks: Ranks = 2,
    sets: Sets = None,
    samples: Annotated[int, typer.Option(help="Of the tuner, at most.")] = 40,
    coarse: Annotated[bool, typer.Option(help="Every other value of the grid only.")] = False,
    part: Annotated[int, typer.Option(min=1, help="Which part of the grid to measure.")] = 1,
    parts: Annotated[int, typer.Option(min=1, help="Into how many parts it is dealt.")] = 1,
    window: Annotated[float, typer.Option(help="Least seconds of a point of the grid.")] = 0.15,
    compute: Annotated[float, typer.Option(help="ms of a backward pass around the tensors.")] = 0.0,
    rounds: Rounds = 5,
    gigabit: Annotated[bool, typer.Option(help="Limit the link to 1 Gbit/s.")] = True,
    out: Out = FOLDER,
    timeout: Timeout = 3600,
) -> None:
    """Automatic tuning beside a full grid of its settings, over two hosts and their link. Needs root."""
    options = {
        "sets": sets or ["resnet50", "tiny1000"],
        "samples": samples,
        "coarse": coarse,
        "compute_ms": compute,
        "part": part,
        "parts": parts,
        "window_s": window,
        "rounds": rounds,
    }
    runs = [launch.on_two_hosts("tuning", ranks, options, timeout, gigabit=gigabit)]
    for result in runs[0]["results"]:
        report.show_rows(console, result["work"], [result["tuning"]])
    _write("tuning", runs, out)


@app.command()
def overlap(
    *,
    ranks: Ranks = 2,
    width: Annotated[int, typer.Option(help="Of each layer.")] = 1024,
    depth: Annotated[int, typer.Option(help="Layers.")] = 12,
    ratio: Annotated[list[float] | None, typer.Option(help="Compute / communication; repeatable.")] = None,
    threshold_mb: Annotated[float, typer.Option(help="fusion_threshold_mb, and DDP's small buckets.")] = 4.0,
    rounds: Rounds = 3,
    turn: TurnS = 0.5,
    gigabit: Annotated[bool, typer.Option(help="Limit the link to 1 Gbit/s.")] = True,
    out: Out = FOLDER,
    timeout: Timeout = 900,
) -> None:
    """Training steps over the link, beside DistributedDataParallel. Needs root."""
    options = {
        "width": width,
        "depth": depth,
        "ratios": ratio or [1.0, 1.5],
        "threshold_mb": threshold_mb,
        "rounds": rounds,
        "turn_s": turn,
    }
    runs = [launch.on_two_hosts("overlap", ranks, options, timeout, gigabit=gigabit)]
    _finish_series("overlap", runs, out, reference="compute alone")
    for result in runs[0]["results"]:
        console.print(
            f"{result['work']}: max(compute, communication) {result['max_ms']:.0f} ms, "
            f"sum {result['sum_ms']:.0f} ms"
        )


@app.command("plan")
def plan_command(
    *,
    ranks: Ranks = 2,
    only: Annotated[
        list[str] | None, typer.Option("--model", help=f"Any of {', '.join(PLANNED)}; repeatable.")
    ] = None,
    buckets: Annotated[list[str] | None, typer.Option(help="dynamic, static; repeatable.")] = None,
    threshold_mb: Annotated[list[float] | None, typer.Option(help="fusion_threshold_mb; repeatable.")] = None,
    steps: Annotated[int, typer.Option(help="Timed steps of each setting.")] = 15,
    gigabit: Annotated[bool, typer.Option(help="Limit the link to 1 Gbit/s.")] = True,
    out: Out = FOLDER,
    timeout: Timeout = 900,
) -> None:
    """Steps as `fusion plan` predicts them beside the same steps really run, over the link. Needs root."""
    options = {
        "models": only or list(PLANNED),
        "buckets": buckets or ["dynamic", "static"],
        "thresholds_mb": threshold_mb or [0.25, 1.0, 4.0, 16.0, 64.0],
        "cycle_time_ms": 1.0,
        "experiment_s": 0.2,
        "steps": steps,
    }
    runs = [launch.on_two_hosts("plan", ranks, options, timeout, gigabit=gigabit)]
    for result in runs[0]["results"]:
        title = (
            f"{result['work']}; compute {result['compute_ms']:.0f} ms, optimum {result['optimal_ms']:.0f} ms"
        )
        report.show_rows(console, title, result["rows"])
    errors = [abs(row["error"]) for result in runs[0]["results"] for row in result["rows"]]
    within = sum(error <= 0.2 for error in errors)
    console.print(f"largest error {max(errors):.0%}; {within} of {len(errors)} within 20 %")
    _write("plan", runs, out)


@app.command()
def idle(
    *,
    ranks: Ranks = 2,
    seconds: Annotated[float, typer.Option(help="How long to do nothing.")] = 10.0,
    out: Out = FOLDER,
    timeout: Timeout = 120,
) -> None:
    """CPU time of a runtime that has nothing to do."""
    runs = [launch.on_this_host("idle", ranks, {"seconds": seconds}, timeout)]
    for result in runs[0]["results"]:
        report.show_rows(console, result["work"], result["idle"])
    _write("idle", runs, out)


@app.command("protocol")
def protocol_command(
    *,
    ranks: ManyRanks = None,
    tensors: Annotated[int, typer.Option(help="To register, at most.")] = 10_000,
    budget: Annotated[int, typer.Option(help="Most ranks x tensors to simulate.")] = 1 << 20,
    out: Out = FOLDER,
) -> None:
    """Negotiation among simulated ranks, and a steady cycle."""
    options = {"ranks": ranks or [4**e for e in range(1, 7)], "tensors": tensors, "budget": budget}
    results = protocol.measure(options)
    report.show_rows(console, "registration", results[:-1])
    report.show_rows(console, "steady state", results[-1:])
    _write("protocol", [{"results": results}], out)
    plots.over_ranks(out / "protocol.png", results)


def _finish_series(benchmark: str, runs: list[dict[str, Any]], out: Path, reference: str = OURS) -> None:
    results = [result for run in runs for result in run["results"]]
    for result in results:
        report.show_series(console, result, reference)
    _write(benchmark, runs, out)
    plots.bars(out / f"{benchmark}.png", results)


def _write(benchmark: str, runs: list[dict[str, Any]], out: Path) -> None:
    command = f"scripts/bench {shlex.join(sys.argv[1:])}"
    target = report.write_json(out, benchmark, command, runs)
    loads = [run["load_before"] for run in runs if run.get("load_before", 0.0) > report.QUIET_LOAD]
    if loads:
        console.print(
            f"[yellow]The machine was not quiet (load {max(loads)} before the start): "
            "the figures are indicative.[/]"
        )
    console.print(f"written to {target}")


if __name__ == "__main__":
    try:
        app()
    except launch.BenchmarkError as error:
        sys.exit(f"bench: {error}")
