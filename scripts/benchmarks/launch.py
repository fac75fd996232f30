"""Starts the ranks of a benchmark, here or on two hosts, and hands back what rank 0 found."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.hosts import INTERFACE, TwoHosts, why_not
from tests.launch import Job, Launcher, LocalLauncher

Found = dict[str, Any]


class BenchmarkError(Exception):
    """The ranks did not come to an end; says what they wrote."""


def on_this_host(benchmark: str, ranks: int, options: dict[str, Any], timeout_s: float) -> Found:
    """Run `ranks` ranks that share memory."""
    return _run(LocalLauncher(), benchmark, ranks, options, timeout_s=timeout_s, env={})


def on_two_hosts(
    benchmark: str, ranks: int, options: dict[str, Any], timeout_s: float, *, gigabit: bool
) -> Found:
    """Run half of the ranks on each of two hosts, see `tests.hosts`.

    Raises:
        BenchmarkError: the hosts cannot be made here, or the ranks failed.
    """
    reason = why_not()
    if reason is not None:
        raise BenchmarkError(reason)
    env = {"BENCH_INTERFACE": INTERFACE, "GLOO_SOCKET_IFNAME": INTERFACE}
    with TwoHosts(gigabit=gigabit) as hosts:
        return _run(hosts, benchmark, ranks, options, timeout_s=timeout_s, env=env)


def _run(
    launcher: Launcher,
    benchmark: str,
    ranks: int,
    options: dict[str, Any],
    *,
    timeout_s: float,
    env: Mapping[str, str],
) -> Found:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        target = Path(folder) / "result.json"
        program = [sys.executable, "-m", "scripts.benchmarks.ranks"]
        before = os.getloadavg()[0]
        job = Job(launcher, [*program, benchmark, json.dumps(options), str(target)], ranks, Path(folder), env)
        try:
            done = job.finish(timeout_s)
        except BaseException:
            job.kill()
            raise
        if done.status or not target.exists():
            raise BenchmarkError(f"{benchmark} did not come to its end\n{done.report()}")
        found: Found = json.loads(target.read_text())
        found["load_before"] = round(before, 2)
        return found
