"""`fusion config show`: the effective settings and where each came from."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from coordinator.errors import ConfigError
from fusion.config import FIELDS, Loaded, load

app = typer.Typer(help="Look at the settings.", no_args_is_help=True)


@app.callback()
def config() -> None:
    """Look at the settings."""


@app.command()
def show(
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="YAML file, as for `fusion run --config`.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Print what `init()` would use here, and where each value came from."""
    try:
        loaded = load(config)
    except ConfigError as error:
        typer.echo(f"fusion config: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(_rows(loaded), indent=2))
    else:
        console = Console()
        console.print(_table(loaded))
        console.print("Strongest first: argument of init(), environment, YAML file, default.")


def _rows(loaded: Loaded) -> dict[str, dict[str, object]]:
    return {
        key: {"value": value, "from": str(loaded.origins[key])}
        for key, value in loaded.config.to_dict().items()
    }


def _table(loaded: Loaded) -> Table:
    table = Table()
    for heading in ("key", "value", "unit", "from"):
        table.add_column(heading, overflow="fold")
    for key, value in loaded.config.to_dict().items():
        shown = "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
        origin = str(loaded.origins[key])
        style = "dim" if key not in loaded.pinned else None
        table.add_row(key, escape(shown), FIELDS[key].unit, escape(origin), style=style)
    return table
