"""`fusion plan`: what a training step will take at each fusion threshold, and which threshold to set.

Starts ranks that measure (`fusion.planning.ranks`), or takes the costs of an
earlier plan, predicts here, and prints. Loads neither torch nor MPI itself.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import msgspec
import typer
import yaml
from rich.console import Console
from rich.table import Table

from coordinator.errors import FusionError
from fusion.cli.launch import Job, command, find_launcher, surroundings
from fusion.cli.processes import STDERR, supervise
from fusion.cli.run import USAGE_ERROR, chosen_hosts, environ_of
from fusion.config import Config, load

if TYPE_CHECKING:
    from fusion.planning.costs import Costs
    from fusion.planning.ranks import Found, Spec
    from fusion.planning.report import Plan
    from fusion.planning.workload import Workload

HELP = (
    "Predict a training step at each fusion threshold, from measurements of the ranks it will run on.\n\n"
    "MODEL is one of:\n\n"
    "- package.module:factory, a function without arguments that returns a torch.nn.Module, or a tuple of "
    "one, its example input and, if need be, a loss function of its output. With an input, forward and "
    "backward are run and timed on the ranks; without one, or on the meta device, give --backward-ms.\n\n"
    "- a .json file: a list of objects with name, shape, dtype and ready_ms (from the beginning of the "
    "backward pass), or a timeline of the runtime.\n\n"
    "- the name of a built-in set: resnet50, bert-large, layer-7b, layer-7b-bf16, tiny1000, "
    "tiny10000, one64mib, one64b.\n\n"
    "The ranks run under mpirun as with fusion run, and do nothing but measure:\n\n"
    "    fusion plan models.net:make -np 4 -H a:2,b:2 --yaml tuned.yaml"
)
SHOWN_GROUPS = 8
_MIB = 1 << 20


def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="See above.", show_default=False)],
    *,
    ranks: Annotated[
        int | None, typer.Option("-np", "--num-proc", min=1, help="Number of ranks.", metavar="N")
    ] = None,
    hosts: Annotated[
        str | None, typer.Option("-H", "--hosts", metavar="HOST:SLOTS,...", help="Hosts and ranks on each.")
    ] = None,
    hostfile: Annotated[
        str | None, typer.Option(metavar="FILE", help="Hosts, one a line: `host slots=4` or `host:4`.")
    ] = None,
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="YAML file with the settings to plan for.")
    ] = None,
    mpi_arg: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Further options for mpirun.")
    ] = None,
    buckets: Annotated[
        str | None, typer.Option(help="dynamic or static, in place of the setting.", metavar="KIND")
    ] = None,
    threshold_mb: Annotated[
        list[float] | None,
        typer.Option(metavar="MIB", min=0, help="A threshold to predict for; repeatable. Default: 0 to 128."),
    ] = None,
    backward_ms: Annotated[
        float | None, typer.Option(metavar="MS", min=0, help="The backward pass, in place of measuring it.")
    ] = None,
    forward_ms: Annotated[
        float | None, typer.Option(metavar="MS", min=0, help="The forward pass, in place of measuring it.")
    ] = None,
    costs: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="JSON of an earlier plan whose measured costs to use; starts no ranks."
        ),
    ] = None,
    experiment_s: Annotated[
        float,
        typer.Option(
            "--experiment-s",
            metavar="S",
            min=0,
            help="Seconds for each of about 40 experiments; fewer are rougher.",
        ),
    ] = 0.2,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write everything there.")
    ] = None,
    yaml_file: Annotated[
        str | None,
        typer.Option("--yaml", metavar="FILE", help="Write the best settings there, for --config."),
    ] = None,
) -> None:
    """Predict steps and print them; see `HELP`."""
    from fusion.planning.report import THRESHOLDS_MB

    try:
        settings = _settings(config, buckets)
        workload, spec = _given(model, _seconds(forward_ms), _seconds(backward_ms), experiment_s)
        if costs is not None:
            found_costs: Costs | None = _read_costs(costs)
            workload = workload or _unmeasured(spec)
        else:
            job = Job(
                np=_number(ranks),
                words=(sys.executable, "-m", "fusion.planning.ranks", msgspec.json.encode(spec).decode()),
                hosts=chosen_hosts(hosts, hostfile),
                mpi_args=tuple(word for text in mpi_arg or () for word in shlex.split(text)),
                prefix=False,
            )
            measured = _measure(job, environ_of(config))
            found_costs, workload = measured.costs, workload or measured.workload
        assert found_costs is not None
        assert workload is not None
        found = _plan(workload, found_costs, settings, threshold_mb or THRESHOLDS_MB)
        _write(found, json_file, yaml_file)
    except FusionError as error:
        typer.echo(f"fusion plan: {error}", err=True)
        raise typer.Exit(USAGE_ERROR) from None
    _show(found, Console(width=None if sys.stdout.isatty() else 120))


def _settings(config: str | None, buckets: str | None) -> Config:
    overrides: dict[str, Any] = {} if buckets is None else {"buckets": buckets}
    return load(config, **overrides).config


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _number(ranks: int | None) -> int:
    from fusion.planning.workload import PlanError

    if ranks is None:
        raise PlanError("how many ranks? give -np N, or --costs FILE with what an earlier plan measured")
    if ranks < 2:
        raise PlanError("one rank has nobody to reduce with: plan for two ranks or more (-np 2)")
    return ranks


def _given(
    model: str, forward_s: float | None, backward_s: float | None, experiment_s: float
) -> tuple[Workload | None, Spec]:
    """The workload, unless the ranks have to make it; and what to ask them.

    Raises:
        PlanError: nothing is known by that name, or the trace is bad.
    """
    from fusion.planning import sets, traces
    from fusion.planning.ranks import Spec
    from fusion.planning.workload import PlanError, spread

    if model in sets.SETS:
        workload = sets.workload(model)
    elif model.endswith(".json") or Path(model).is_file():
        workload = traces.read(model)
    elif ":" in model:
        return None, Spec(model, forward_s, backward_s, experiment_s)
    else:
        raise PlanError(
            f"{model}: neither package.module:factory, nor a .json trace, nor one of the built-in sets "
            + ", ".join(sets.SETS)
        )
    if forward_s is not None:
        workload = msgspec.structs.replace(workload, forward_s=forward_s)
    if backward_s is not None:
        untimed = workload.backward_s == 0
        workload = (spread if untimed else traces.stretched)(workload, backward_s)
    return workload, Spec(experiment_s=experiment_s)


def _unmeasured(spec: Spec) -> Workload:
    """The workload of a module, without ranks: its example input is run here."""
    from fusion.planning import models

    assert spec.model is not None
    model = models.load(spec.model)
    profiled = models.profile(model) if model.inputs is not None else None
    return models.workload(model, profiled, forward_s=spec.forward_s, backward_s=spec.backward_s)


def _read_costs(path: str) -> Costs:
    from fusion.planning.costs import Costs
    from fusion.planning.workload import PlanError

    try:
        return msgspec.convert(json.loads(Path(path).read_text(encoding="utf-8"))["costs"], Costs)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanError(
            f"{path}: no costs in this file; --json of an earlier plan writes them: {error!r}"
        ) from error


def _measure(job: Job, environ: dict[str, str]) -> Found:
    """Run the ranks; whatever they print beside their answer goes to standard error.

    Raises:
        FusionError: they cannot be started, or ended without an answer, or with an error.
    """
    from fusion.planning.ranks import MARK, Found
    from fusion.planning.workload import PlanError

    launcher = find_launcher(environ=environ)
    lines = _Answer(MARK.encode())
    status = supervise(command(launcher, job, surroundings(environ)), environ, relay=lines.relay)
    if lines.answer is None:
        raise PlanError(f"the ranks that measure ended with status {status} and no answer; see above")
    found = msgspec.json.decode(lines.answer, type=Found)
    if found.error is not None:
        raise PlanError(found.error)
    return found


class _Answer:
    """Picks the marked line out of what the ranks print, on the threads that read their streams."""

    def __init__(self, mark: bytes) -> None:
        self.answer: bytes | None = None
        self._mark = mark

    def relay(self, source: IO[bytes], _target: int) -> None:
        """Read a stream to its end."""
        for line in source:
            _, marked, answer = line.partition(self._mark)
            if marked:
                self.answer = answer
            else:
                os.write(STDERR, line)


def _plan(workload: Workload, costs: Costs, config: Config, thresholds_mb: Sequence[float]) -> Plan:
    from fusion.planning.prediction import Settings
    from fusion.planning.report import make_plan

    settings = Settings(config.fusion_threshold_mb, config.cycle_time_ms / 1e3, config.buckets)
    return make_plan(workload, costs, settings, thresholds_mb)


def _write(found: Plan, json_file: str | None, yaml_file: str | None) -> None:
    """Write the files that were asked for.

    Raises:
        PlanError: one cannot be written.
    """
    from fusion.planning.workload import PlanError

    texts = {}
    if json_file is not None:
        texts[json_file] = json.dumps(found.to_json(), indent=1) + "\n"
    if yaml_file is not None:
        settings = {"fusion_threshold_mb": found.best.threshold_mb, "buckets": found.settings.buckets}
        head = f"# From `fusion plan {found.workload.name}` for {found.costs.ranks} ranks.\n"
        texts[yaml_file] = head + yaml.safe_dump(settings, sort_keys=False)
    for path, text in texts.items():
        try:
            Path(path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise PlanError(f"{path}: cannot be written: {error.strerror}") from error


def _show(found: Plan, console: Console) -> None:
    workload, costs = found.workload, found.costs
    curve = costs.curve(found.settings.buckets)
    console.print(
        f"{workload.name}: {len(workload.tensors)} tensors, {workload.nbytes / _MIB:.3g} MiB; "
        f"forward {1e3 * workload.forward_s:.4g} ms, backward {1e3 * workload.backward_s:.4g} ms",
        markup=False,
        highlight=False,
    )
    console.print(
        f"{costs.ranks} ranks on {len(costs.nodes)} node{'s' * (len(costs.nodes) > 1)}, {costs.algorithm}, "
        f"{found.settings.buckets} buckets: {1e6 * (curve.cycle_s + curve.response_s):.3g} us a bucket, "
        f"{curve.bandwidth / 1e6:.4g} MB/s; computing {curve.compute_stretch:.2f} x as long beside it",
        highlight=False,
    )
    if workload.backward_s == 0:
        console.print("All tensors are ready at once: give --backward-ms to see what overlaps.")
    console.print(_table(found))
    optimal = found.optimal
    console.print(
        f"Optimal merging: {len(optimal.groups)} groups, step {1e3 * optimal.step_s:.4g} ms, exposed "
        f"{1e3 * optimal.exposed_s:.4g} ms (MG-WFBP's rule: {len(found.published.groups)} groups, "
        f"{1e3 * found.published.step_s:.4g} ms)",
        highlight=False,
    )
    for number, group in enumerate(found.groups()[:SHOWN_GROUPS]):
        last = f" to {group[-1]}" if len(group) > 1 else ""
        console.print(
            f"  {number + 1}: {len(group)} tensors, {group[0]}{last}", markup=False, highlight=False
        )
    if len(optimal.groups) > SHOWN_GROUPS:
        console.print(f"  and {len(optimal.groups) - SHOWN_GROUPS} more; --json has all", highlight=False)
    gap = found.best.step_s / optimal.step_s - 1.0
    console.print(
        f"Nearest to it: fusion_threshold_mb {found.best.threshold_mb:g}, step "
        f"{1e3 * found.best.step_s:.4g} ms ({gap:+.1%})",
        highlight=False,
    )


def _table(found: Plan) -> Table:
    table = Table()
    for heading in ("threshold MiB", "buckets", "step ms", "exposed ms", "buffers MiB a rank"):
        table.add_column(heading, justify="right")
    for row in found.predictions:
        table.add_row(
            f"{row.threshold_mb:g}",
            str(row.buckets),
            f"{1e3 * row.step_s:.4g}",
            f"{1e3 * row.exposed_s:.4g}",
            f"{row.buffer_bytes / _MIB:.4g}",
            style="bold" if row is found.best else None,
        )
    return table
