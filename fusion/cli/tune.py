"""`fusion tune`: runs a job as `fusion run` does, with tuning on, and says what was found."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from coordinator.errors import ConfigError
from fusion.cli.launch import LaunchError
from fusion.cli.run import USAGE_ERROR, environ_of, job_of, line_of, start
from fusion.config import load

HELP = (
    "Find better settings for a job: run it as `fusion run` does, while settings are tried, and write the "
    "best to a YAML file.\n\n"
    "    fusion tune -np 4 train.py --epochs 1\n\n"
    "    fusion run -np 4 --config tuned.yaml train.py\n\n"
    "The program must reduce the same tensors in every step, and needs about 6 steps for each sample. Its "
    "results are those of `fusion run`. Settings that the environment or the "
    "file of --config gives are left alone. "
    "When the program ends before the search does, the best so far is written. Needs the extra `tune`."
)
_POLL_S = 0.5
_STOPPED = 128 + signal.SIGTERM


def tune(  # noqa: PLR0917 - the command line's options, passed by name
    ctx: typer.Context,
    ranks: Annotated[int, typer.Option("-np", "--num-proc", min=1, help="Number of ranks.", metavar="N")],
    words: Annotated[
        list[str],
        typer.Argument(metavar="PROGRAM", help="What to run, and its arguments.", show_default=False),
    ],
    out: Annotated[str, typer.Option(metavar="FILE", help="YAML file for the result.")] = "tuned.yaml",
    log: Annotated[str | None, typer.Option(metavar="FILE", help="CSV file for all samples.")] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Settings to measure. Default: 40.")
    ] = None,
    stop: Annotated[bool, typer.Option("--stop", help="End the job when the search is over.")] = False,
    hosts: Annotated[
        str | None, typer.Option("-H", "--hosts", metavar="HOST:SLOTS,...", help="Hosts and ranks on each.")
    ] = None,
    hostfile: Annotated[str | None, typer.Option(metavar="FILE", help="Hosts, as for fusion run.")] = None,
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="YAML file with settings to leave as they are.")
    ] = None,
    mpi_arg: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Further options for mpirun.")
    ] = None,
    as_horovod: Annotated[
        bool,
        typer.Option("--as-horovod", help="Let `import horovod` in the ranks mean this runtime."),
    ] = False,
    prefix: Annotated[bool, typer.Option(help="Begin each line of output with its rank.")] = True,
) -> None:
    """Start the job that the command line describes, tuned; see `HELP`."""
    result = Path(out).absolute()
    try:
        environ = environ_of(config, as_horovod=as_horovod)
        environ |= _settings(result, log, samples)
        _check_keys(environ)
        job = job_of(
            ctx, ranks=ranks, words=words, hosts=hosts, hostfile=hostfile, mpi_arg=mpi_arg, prefix=prefix
        )
        launcher, line = line_of(job, environ)
    except (ConfigError, LaunchError) as error:
        typer.echo(f"fusion tune: {error}", err=True)
        raise typer.Exit(USAGE_ERROR) from None
    before = _written(result)
    if stop:
        threading.Thread(target=_stop_when_written, args=(result, before), daemon=True).start()
    status = start(launcher, line, job, environ)
    found = _written(result) != before
    if stop and found and status == _STOPPED:
        status = 0
    typer.echo(_summary(result) if found else f"fusion tune: {result} was not written", err=not found)
    raise typer.Exit(status or int(not found))


def _settings(result: Path, log: str | None, samples: int | None) -> dict[str, str]:
    """The variables that switch tuning on."""
    settings = {"FUSION_AUTOTUNE": "on", "FUSION_AUTOTUNE_FILE": str(result)}
    if log is not None:
        settings["FUSION_AUTOTUNE_LOG"] = os.path.abspath(log)
    if samples is not None:
        settings["FUSION_AUTOTUNE_SAMPLES"] = str(samples)
    return settings


def _check_keys(environ: dict[str, str]) -> None:
    from fusion.tuning.space import KEYS

    loaded = load(environ=environ)
    if loaded.pinned >= set(KEYS):
        where = ", ".join(f"{key} ({loaded.origins[key]})" for key in KEYS)
        raise ConfigError(f"there is nothing to tune, because every key was set: {where}")


def _written(path: Path) -> int | None:
    """When a file was written, if there is one."""
    return path.stat().st_mtime_ns if path.is_file() else None


def _stop_when_written(path: Path, before: int | None) -> None:
    pause = threading.Event()
    while _written(path) == before:
        pause.wait(_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)  # As if the user had: all ranks end, and their leftovers.


def _summary(path: Path) -> str:
    comments = [line[2:] for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# ")]
    return "\n".join(["fusion tune:", *(f"  {line}" for line in comments), f"  Written to {path}"])
