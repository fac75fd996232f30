"""Starts programs under mpirun, watches them, and ends them for certain.

Used by the outer pytest only. Each rank writes to a log file of its own, so that
nothing is lost or mixed when ranks die. A job that runs out of time has the
Python stack of every rank taken, then all its processes are killed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import psutil

ROOT = Path(__file__).resolve().parent.parent
POLL_S = 0.02
KILL_S = 10.0
# The rank's number is in another variable with each MPI. With `exec` the rank stays its launcher's own child.
_LOGGED = (
    'rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${PMIX_RANK:-0}}}; exec "$@" >>"$RANK_LOGS/$rank.log" 2>&1'
)
_LAUNCHER_VARIABLES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "OPAL_", "HYDRA_", "MPIR_")


class Launcher(Protocol):
    """Where ranks run."""

    def command(self, np: int) -> list[str]:
        """What to put before a program so that it runs as `np` ranks."""
        ...


@cache
def mpirun() -> tuple[str, bool]:
    """The mpirun beside this Python, else on the PATH; and whether it is Open MPI's."""
    beside = str(Path(sys.executable).parent)
    found = shutil.which("mpirun", path=f"{beside}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        raise FileNotFoundError("no mpirun found: install the extra 'mpi', or an MPI")
    version = subprocess.run(
        [found, "--version"], capture_output=True, text=True, check=True, env=environment()
    )
    return found, "Open MPI" in version.stdout


class LocalLauncher:
    """All ranks on this machine, more of them than cores if need be."""

    def command(self, np: int) -> list[str]:
        program, open_mpi = mpirun()
        options = ["--bind-to", "none", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]
        return [program, *(options if open_mpi else []), "-np", str(np)]


@dataclass(frozen=True)
class Finished:
    """How a job ended."""

    status: int
    """Exit status of mpirun; negative for a signal."""
    elapsed: float
    """Seconds from start to end."""
    outputs: tuple[str, ...]
    """What each rank wrote to its standard output and error."""
    launcher_output: str
    stacks: str
    """Python stacks of the ranks when the time was up, else empty."""

    @property
    def timed_out(self) -> bool:
        return bool(self.stacks)

    def report(self) -> str:
        """Everything, each line with the rank that wrote it."""
        lines = [f"mpirun ended with status {self.status} after {self.elapsed:.1f} s"]
        lines += [f"mpirun | {line}" for line in self.launcher_output.splitlines()]
        lines += [
            f"rank {rank} | {line}"
            for rank, output in enumerate(self.outputs)
            for line in output.splitlines()
        ]
        return "\n".join([*lines, self.stacks])


class Job:
    """A running mpirun.

    Args:
        launcher: where the ranks run.
        program: the command of one rank.
        np: number of ranks.
        folder: where logs go.
        env: variables beside this process's own.
    """

    def __init__(
        self,
        launcher: Launcher,
        program: Sequence[str],
        np: int,
        folder: Path,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._np = np
        self._folder = folder
        self._launcher_log = folder / "mpirun.log"
        self._started = time.monotonic()
        self._stacks = ""
        with self._launcher_log.open("wb") as log:
            self._process = psutil.Popen(
                [*launcher.command(np), "sh", "-c", _LOGGED, "sh", *program],
                cwd=ROOT,
                env={**environment(), **_session(folder), "RANK_LOGS": str(folder), **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    def running(self) -> bool:
        return self._process.poll() is None

    def processes(self) -> list[psutil.Process]:
        """mpirun and all that it started, known by the log folder in their environment.

        A daemon that MPI starts on another host is no child of anything here.
        """
        mark = str(self._folder)
        found = [p for p in psutil.process_iter() if p == self._process or _variable(p, "RANK_LOGS") == mark]
        return [process for process in found if process.pid != os.getpid()]

    def wait(self, timeout: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Wait for the job's end or for `until`; False if the time was up before that."""
        end = time.monotonic() + timeout
        while self.running() and not until():
            if time.monotonic() > end:
                return False
            time.sleep(POLL_S)
        return True

    def take_stacks(self) -> None:
        """Note where every rank is now."""
        self._stacks = (
            "\n".join(_stack(process) for process in self.processes() if _is_python(process))
            or "no Python process was left"
        )

    def kill(self) -> None:
        """End all processes of the job, and return when they are gone."""
        processes = self.processes()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        end = time.monotonic() + KILL_S
        while any(_alive(process) for process in processes) and time.monotonic() < end:
            time.sleep(POLL_S)

    def finish(self, timeout: float) -> Finished:
        """Wait for the end, or make one."""
        if not self.wait(timeout):
            self.take_stacks()
        # Also after a good end: ranks that outlive their mpirun must not outlive the test.
        self.kill()
        return Finished(
            status=self._process.wait(),
            elapsed=self.elapsed,
            outputs=tuple(_read(self._folder / f"{rank}.log") for rank in range(self._np)),
            launcher_output=_read(self._launcher_log),
            stacks=self._stacks,
        )


def environment() -> dict[str, str]:
    """The variables of a job: this process's own, but for those of an MPI it may run under."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER_VARIABLES)}
    path = [str(ROOT), *filter(None, [env.get("PYTHONPATH")])]
    return env | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        # Several ranks share few cores; more threads than that only get in each other's way.
        "OMP_NUM_THREADS": "1",
    }


def _session(folder: Path) -> dict[str, str]:
    """Has Open MPI keep its own files in the job's folder.

    A killed mpirun leaves a folder named for its process number behind, and one that gets that number again
    does not start beside it ("The PMIx server's listener thread failed to start").
    """
    return {"PRTE_MCA_prte_tmpdir_base": str(folder)}


def _alive(process: psutil.Process) -> bool:
    """Whether it still runs; a zombie that nobody has collected yet does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _variable(process: psutil.Process, name: str) -> str | None:
    try:
        value: str | None = process.environ().get(name)
    except psutil.Error:
        return None
    return value


def _is_python(process: psutil.Process) -> bool:
    try:
        return process.name().startswith("python")
    except psutil.NoSuchProcess:
        return False


def _stack(process: psutil.Process) -> str:
    spy = shutil.which(
        "py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    )
    if spy is None:
        return f"process {process.pid}: py-spy is not installed, so there is no stack"
    dump = subprocess.run(
        [spy, "dump", "--pid", str(process.pid)], capture_output=True, text=True, check=False, timeout=30
    )
    return f"{dump.stdout}{dump.stderr}"


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
