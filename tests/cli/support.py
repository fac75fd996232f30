"""Runs the `fusion` command as a user does, in a process of its own and in a clean environment."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fusion.cli.launch import LaunchError, find_launcher

ROOT = Path(__file__).parents[2]
FUSION = (sys.executable, "-m", "fusion.cli")
TIMEOUT_S = 60


def has_launcher() -> bool:
    try:
        find_launcher()
    except LaunchError:
        return False
    return True


needs_launcher = pytest.mark.skipif(not has_launcher(), reason="no Open MPI or MPICH launcher here")


def environment(**extra: str) -> dict[str, str]:
    """That of this process without settings, and without traces of an mpirun around the tests."""
    ours = ("FUSION_", "HOROVOD_", "OMPI_", "PMIX_", "PRTE_", "PMI_", "HYDRA_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**kept, "PYTHONPATH": path, **extra}


def fusion(*words: object, before: Sequence[str] = (), **extra: str) -> subprocess.CompletedProcess[str]:
    """Run `fusion WORDS` to its end, with what is to stand before it, such as `TwoHosts.on(0)`."""
    line = [*before, *FUSION, *map(str, words)]
    return subprocess.run(
        line, env=environment(**extra), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something another process does; fail where it does not come."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {TIMEOUT_S} s for {what}")
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended but was not collected yet does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
