"""The files of tuning: the settings that were found, as YAML, and every sample, as CSV."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import yaml

from coordinator.tuning import Knobs
from fusion.config import Config
from fusion.tuning.search import Search
from fusion.tuning.space import KEYS, Space

_OF_THE_RUN = ("autotune", "autotune_samples", "autotune_file", "autotune_log", "timeline", "log_level")
"""Keys that say what to do with one run, not how to run well."""


def write_yaml(
    path: str | os.PathLike[str],
    search: Search,
    space: Space,
    *,
    config: Config,
    pinned: Collection[str],
    finished: bool,
) -> None:
    """Write the best settings so far, and the keys that the user gave, so that the file replaces theirs.

    It appears whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    best, _ = search.best
    kept = {key: value for key, value in config.to_dict().items() if key in pinned and key not in _OF_THE_RUN}
    tuned = {key: getattr(best, key) for key in KEYS if key in space.choices}
    text = "\n".join([*_comments(search, space, finished=finished), "", _yaml(tuned)])
    others = {key: value for key, value in kept.items() if key not in tuned}
    if others:
        text += "\n# As they were set.\n" + _yaml(others)
    target = Path(path)
    fresh = target.with_name(f"{target.name}.{os.getpid()}.new")
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)


def _comments(search: Search, space: Space, *, finished: bool) -> list[str]:
    _, seconds = search.best
    cut = "" if finished else "; the program ended before the search did"
    lines = [
        f"# Tuned in {search.taken} samples{cut}.",
        f"# A step took {_ms(search.start_seconds)} before and {_ms(seconds)} with these settings.",
    ]
    return [*lines, *(f"# Left alone: {key}, because {reason}." for key, reason in space.left_alone.items())]


def _ms(seconds: float) -> str:
    return "an unknown time" if math.isnan(seconds) else f"{1e3 * seconds:.3g} ms"


def _yaml(values: dict[str, Any]) -> str:
    return yaml.safe_dump(values, sort_keys=False) if values else ""


class SampleLog:
    """One line for every sample, complete at once.

    Args:
        path: of the CSV file; None for no file.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self._stream = None if path is None else open(path, "w", encoding="utf-8", newline="")  # noqa: SIM115 - closed by `close`
        self._write(["sample", *KEYS, "steps", "step_ms"])

    def sample(self, number: int, knobs: Knobs, steps: int, seconds: float) -> None:
        """A sample was taken: the median of `steps` steps is `seconds`."""
        self._write([number, *(getattr(knobs, key) for key in KEYS), steps, f"{1e3 * seconds:.4f}"])

    def close(self) -> None:
        """Finish the file; may be called twice."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _write(self, row: Sequence[object]) -> None:
        if self._stream is not None:
            csv.writer(self._stream).writerow(row)
            self._stream.flush()
