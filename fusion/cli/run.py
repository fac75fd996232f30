"""`fusion run`: starts a job under mpirun and stays until all of it has ended."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from coordinator.errors import ConfigError
from fusion.cli.launch import (
    Host,
    Job,
    Launcher,
    LaunchError,
    command,
    find_launcher,
    parse_hosts,
    read_hostfile,
    surroundings,
)
from fusion.cli.output import relay
from fusion.cli.processes import supervise
from fusion.config import load
from fusion.config.sources import CONFIG_VARIABLE

USAGE_ERROR = 2
# Holds a package `horovod` that is this runtime.
AS_HOROVOD = Path(__file__).parents[1] / "as_horovod"
HELP = (
    "Start a job: the same program on every rank, under the mpirun of this environment.\n\n"
    "Options of fusion run come first. The first word that is none of them is the program, and all "
    "words after it are its arguments. A .py file runs with the Python that has this package, and "
    "programs of that Python's environment are found first:\n\n"
    "    fusion run -np 2 --config configs/default.yaml scripts/train.py --lr 1\n\n"
    "    fusion run -np 4 -H a:2,b:2 python -m pytest tests/mpi\n\n"
    "After a -- in the program's place, everything goes to mpirun as it stands, its options and the "
    "program; an option given there replaces the one that fusion run would have given:\n\n"
    "    fusion run -np 2 -- --mca btl tcp,self python train.py\n\n"
    "With --as-horovod a script that imports horovod.torch runs unchanged, on this runtime:\n\n"
    "    fusion run --as-horovod -np 2 train_with_horovod.py\n\n"
    "Open MPI and MPICH are known. The exit status is mpirun's, or 128 + n when signal n ended the job. "
    "Ctrl-C ends all ranks."
)
_VERBATIM = "fusion.verbatim"


class RunCommand(TyperCommand):
    """Stops reading options at the first word that is none, and notes a `--` in front of it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.context_settings = {**self.context_settings, "allow_interspersed_args": False}

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ARG002 - typer calls it so
        return ["-np N [OPTIONS]", "PROGRAM [ARGS]... | -- MPIRUN_ARGS..."]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        rest = super().parse_args(ctx, args)
        words = len(ctx.params.get("words") or ())
        # The parser drops the separator: it was there if it stands before the words left over.
        ctx.meta[_VERBATIM] = len(given) > words and given[len(given) - words - 1] == "--"
        return rest


def run(  # noqa: PLR0917 - the command line's options, passed by name
    ctx: typer.Context,
    ranks: Annotated[int, typer.Option("-np", "--num-proc", min=1, help="Number of ranks.", metavar="N")],
    words: Annotated[
        list[str],
        typer.Argument(metavar="PROGRAM", help="What to run, and its arguments.", show_default=False),
    ],
    hosts: Annotated[
        str | None, typer.Option("-H", "--hosts", metavar="HOST:SLOTS,...", help="Hosts and ranks on each.")
    ] = None,
    hostfile: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Hosts, one a line: `host slots=4` or `host:4`."),
    ] = None,
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="YAML file with settings for all ranks.")
    ] = None,
    mpi_arg: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help='Further options for mpirun, as in --mpi-arg "--mca btl tcp,self".'
        ),
    ] = None,
    as_horovod: Annotated[
        bool,
        typer.Option("--as-horovod", help="Let `import horovod` in the ranks mean this runtime."),
    ] = False,
    prefix: Annotated[bool, typer.Option(help="Begin each line of output with its rank.")] = True,
    show: Annotated[bool, typer.Option("--show", help="Print the mpirun command; do not run it.")] = False,
) -> None:
    """Start the job that the command line describes; see `HELP`."""
    try:
        environ = environ_of(config, as_horovod=as_horovod)
        job = job_of(
            ctx, ranks=ranks, words=words, hosts=hosts, hostfile=hostfile, mpi_arg=mpi_arg, prefix=prefix
        )
        launcher, line = line_of(job, environ)
    except (ConfigError, LaunchError) as error:
        typer.echo(f"fusion run: {error}", err=True)
        raise typer.Exit(USAGE_ERROR) from None
    if show:
        typer.echo(shlex.join(line))
        return
    raise typer.Exit(start(launcher, line, job, environ))


def job_of(
    ctx: typer.Context,
    *,
    ranks: int,
    words: Sequence[str],
    hosts: str | None,
    hostfile: str | None,
    mpi_arg: Sequence[str] | None,
    prefix: bool,
) -> Job:
    """What the options of `fusion run` ask for.

    Raises:
        LaunchError: the hosts cannot be read.
    """
    return Job(
        np=ranks,
        words=tuple(words),
        verbatim=ctx.meta[_VERBATIM],
        hosts=chosen_hosts(hosts, hostfile),
        mpi_args=tuple(word for text in mpi_arg or () for word in shlex.split(text)),
        prefix=prefix,
    )


def line_of(job: Job, environ: Mapping[str, str]) -> tuple[Launcher, list[str]]:
    """The mpirun and the command line for a job.

    Raises:
        LaunchError: the job cannot be started here.
    """
    if not job.verbatim:
        _check_program(job, environ["PATH"])
    launcher = find_launcher(environ=environ)
    return launcher, command(launcher, job, surroundings(environ))


def start(launcher: Launcher, line: Sequence[str], job: Job, environ: Mapping[str, str]) -> int:
    """Run a job to its end; the exit status."""
    return supervise(line, environ, relay=relay if launcher.family == "MPICH" and job.prefix else None)


def environ_of(config: str | None, *, as_horovod: bool = False) -> dict[str, str]:
    """The ranks' environment. Only what the user gave is set, so that no default looks pinned."""
    environ = dict(os.environ)
    _put_first(environ, "PATH", os.path.dirname(sys.executable))
    if as_horovod:
        _put_first(environ, "PYTHONPATH", str(AS_HOROVOD))
    if config is not None:
        environ[CONFIG_VARIABLE] = os.path.abspath(config)
    load(config, environ=environ)  # one message here, rather than one traceback a rank
    return environ


def _put_first(environ: dict[str, str], variable: str, folder: str) -> None:
    environ[variable] = os.pathsep.join(filter(None, (folder, environ.get(variable))))


def chosen_hosts(hosts: str | None, hostfile: str | None) -> tuple[Host, ...]:
    """The hosts of `-H` or `--hostfile`; none given, none.

    Raises:
        LaunchError: both were given, or one cannot be read.
    """
    if hosts is not None and hostfile is not None:
        raise LaunchError("give -H or --hostfile, not both")
    if hosts is not None:
        return parse_hosts(hosts)
    return read_hostfile(hostfile) if hostfile is not None else ()


def _check_program(job: Job, path: str) -> None:
    """Say here what a missing program is, rather than have every rank say it."""
    first = job.words[0]
    if first.endswith(".py"):
        if not os.path.isfile(first):
            raise LaunchError(f"{first}: there is no such file")
    elif not job.hosts and shutil.which(first, path=path) is None:
        raise LaunchError(f"{first}: no such program on PATH, and no .py file")
