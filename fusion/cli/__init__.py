"""The `fusion` command: `run`, `tune`, `plan`, `doctor` and `config show`.

Importing it, and showing the configuration, loads neither torch nor MPI.
"""

from __future__ import annotations


def main() -> None:
    """Entry point of the console script."""
    from fusion.cli.app import app

    app(prog_name="fusion")
