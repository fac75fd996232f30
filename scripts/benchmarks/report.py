"""What came out, for people: a table on the terminal, JSON with the circumstances, and plots."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Result = dict[str, Any]

QUIET_LOAD = 0.3
"""A load average above it, before the start, means that something else was running."""


def machine() -> dict[str, Any]:
    """Where it was measured."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def write_json(folder: Path, benchmark: str, command: str, runs: Sequence[dict[str, Any]]) -> Path:
    """Everything that was measured, in `folder`/`benchmark`.json."""
    load = max((run.get("load_before", 0.0) for run in runs), default=0.0)
    report = {
        "benchmark": benchmark,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "commit": _commit(),
        "machine": machine(),
        "load_before": load,
        "quiet": load <= QUIET_LOAD,
        "runs": list(runs),
    }
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{benchmark}.json"
    target.write_text(json.dumps(report, indent=1) + "\n")
    return target


def show_series(console: Console, result: Result, reference: str) -> None:
    """The contestants of one piece of work, and how they stand to `reference`."""
    series = result["series"]
    if reference not in series:
        reference = min(series, key=lambda name: series[name]["median_ms"])
    table = Table(title=f"{result['work']}, {result['ranks']} ranks", title_justify="left")
    table.add_column("contestant")
    for column in ("median ms", "rounds ms", "fastest", "slowest", f"x {reference}"):
        table.add_column(column, justify="right")
    base = series[reference]["median_ms"]
    for name, found in sorted(series.items(), key=lambda item: item[1]["median_ms"]):
        rounds = found["round_medians_ms"]
        table.add_row(
            name,
            _figure(found["median_ms"]),
            f"{_figure(min(rounds))} to {_figure(max(rounds))}",
            _figure(found["min_ms"]),
            _figure(found["max_ms"]),
            f"{found['median_ms'] / base:.2f}" if base else "",
        )
    console.print(table)


def show_rows(console: Console, title: str, rows: Sequence[Result]) -> None:
    """Results that are single figures."""
    table = Table(title=title, title_justify="left")
    for column in rows[0]:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(_figure(value) if isinstance(value, float) else str(value) for value in row.values()))
    console.print(table)


def _figure(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"
