"""`python -m fusion.cli`: the `fusion` command where no console script is installed."""

from __future__ import annotations

from fusion.cli import main

main()
