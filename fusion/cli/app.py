"""Puts the subcommands together; each is in a file of its own."""

from __future__ import annotations

import typer

from fusion.cli import config_cmd, doctor, plan, run, tune

app = typer.Typer(
    help="Tensor Fusion Runtime: start jobs, tune and plan them, look at the installation and the settings.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("run", cls=run.RunCommand, help=run.HELP)(run.run)
app.command("tune", cls=run.RunCommand, help=tune.HELP)(tune.tune)
app.command("plan", help=plan.HELP)(plan.plan)
app.command("doctor")(doctor.doctor)
app.add_typer(config_cmd.app, name="config")
