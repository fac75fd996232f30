"""Tests that run inside mpirun: written once, run at several numbers of ranks.

    @ranks(1, 2, 4)
    def test_sum(hvd):
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [hvd.size()] * 3

The pytest that a person starts collects such a test once for each number, and
never runs it itself. For all tests of a module with one number of ranks it starts
one mpirun of `tests.rank_main`, whose ranks run them in step and report into
files; the outcome of a test is made of what all ranks report, or fail to.

While one mpirun works, the ranks of the next start and load what they need, and
wait with their first test until they are asked.

A test that fails, hangs or kills a rank takes its mpirun with it, since the ranks
are then out of step; the tests after it go on in a fresh one.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.launch import Job, Launcher

TEST_S = 60.0
"""The time of one test on all ranks."""
STARTUP_S = 60.0
"""Time beside that for the first test of an mpirun, and for its end."""
GRACE_S = 5.0
"""Once a rank has failed, the others have so long to come to an end of the same test."""
RESULTS = "RANK_RESULTS"
"""The variable that tells a pytest that it is one rank of a job; holds the folder for reports."""
COUNT = "RANK_COUNT"
BEGIN = "begin"
"""The file in that folder whose coming lets the ranks begin."""

Report = dict[str, Any]


def ranks(*counts: int) -> pytest.MarkDecorator:
    """Run the test inside mpirun at each of these numbers of ranks."""
    return pytest.mark.ranks(*counts)


def inside() -> bool:
    """Whether this pytest is one rank of a job."""
    return RESULTS in os.environ


def count_of(item: pytest.Item) -> int | None:
    """Number of ranks the item asks for, or None for an ordinary test."""
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get("rank_count")


@dataclass(frozen=True)
class Verdict:
    """The outcome of one test over all ranks."""

    outcome: str
    text: str
    duration: float


class RankRunner:
    """Gives a verdict for one item after the other; keeps an mpirun going between them.

    Args:
        items: all that will be asked for, in that order.
        launcher: where ranks run.
    """

    def __init__(self, items: Sequence[pytest.Item], launcher: Launcher) -> None:
        self._left = [(item.nodeid, _key(item)) for item in items if count_of(item) is not None]
        self._launcher = launcher
        self._run: _Run | None = None
        self._next: _Run | None = None

    def verdict(self, item: pytest.Item) -> Verdict:
        run = self._run_for(item)
        self._left.remove((item.nodeid, run.key))
        run.begin()
        if self._next is None:
            self._next = self._start_other_than(run.key, item.config)
        verdict = run.verdict(item.nodeid)
        if run.over:
            self._run = None
        return verdict

    def close(self) -> None:
        """End what is still running."""
        for run in filter(None, (self._run, self._next)):
            run.close()
        self._run = self._next = None

    def _run_for(self, item: pytest.Item) -> _Run:
        key = _key(item)
        if self._run is not None and self._run.key != key:
            self._run.close()
            self._run = None
        if self._run is None and self._next is not None and self._next.key == key:
            self._run, self._next = self._next, None
        if self._run is None:
            self._run = self._start(key, item.config)
        return self._run

    def _start_other_than(self, key: _Key, config: pytest.Config) -> _Run | None:
        other = next((its_key for _, its_key in self._left if its_key != key), None)
        return None if other is None else self._start(other, config)

    def _start(self, key: _Key, config: pytest.Config) -> _Run:
        task = {
            "module": key[0],
            "nodeids": [nodeid for nodeid, its_key in self._left if its_key == key],
            "rootdir": str(config.rootpath),
            "inifile": str(config.inipath),
            "pid": os.getpid(),
        }
        return _Run(key, task, self._launcher)


_Key = tuple[str, int]
"""A module and a number of ranks, which one mpirun serves."""


def _key(item: pytest.Item) -> _Key:
    return str(item.path), count_of(item) or 0


class _Run:
    """One mpirun over some tests of a module, up to its end or the first test that fails."""

    def __init__(self, key: _Key, task: dict[str, Any], launcher: Launcher) -> None:
        self.key = key
        self.over = False
        count = key[1]
        self._last = task["nodeids"][-1]
        self._time = STARTUP_S + TEST_S
        self._temporary = tempfile.TemporaryDirectory(prefix="ranks-")
        self._folder = Path(self._temporary.name)
        (self._folder / "task.json").write_text(json.dumps(task))
        self._reports: list[dict[str, Report]] = [{} for _ in range(count)]
        program = [sys.executable, "-m", "tests.rank_main"]
        env = {RESULTS: str(self._folder), COUNT: str(count)}
        self._job = Job(launcher, program, count, self._folder, env)

    def begin(self) -> None:
        """Let the ranks go on to their tests."""
        (self._folder / BEGIN).touch()

    def verdict(self, nodeid: str) -> Verdict:
        """Wait for the test's end on all ranks; ends the run if it did not go well."""
        began = self._job.elapsed
        try:
            self._job.wait(self._time, lambda: self._complete(nodeid) or self._failed(nodeid))
            self._time = TEST_S
            if self._failed(nodeid):
                self._job.wait(GRACE_S, lambda: self._complete(nodeid))
            good = self._complete(nodeid) and not self._failed(nodeid)
            text = "" if good else self._story(nodeid)
            if good and nodeid == self._last:
                good, text = self._end()
        except BaseException:
            self.close()
            raise
        if not good:
            self.close()
            return Verdict("failed", text, self._job.elapsed - began)
        outcome = self._outcome(nodeid)
        if outcome == "skipped":
            text = self._reports[0][nodeid]["text"]
        return Verdict(outcome, text, self._job.elapsed - began)

    def close(self) -> None:
        """Kill what is left of the job."""
        self.over = True
        self._job.kill()
        self._temporary.cleanup()

    def _end(self) -> tuple[bool, str]:
        """Let the job end by itself; whether it ended well, and its story if not."""
        finished = self._job.finish(STARTUP_S)
        self.over = True
        self._temporary.cleanup()
        if finished.status == 0 and not finished.timed_out:
            return True, ""
        return False, f"all tests passed, but the ranks did not end well\n{finished.report()}"

    def _complete(self, nodeid: str) -> bool:
        self._read()
        return all(nodeid in reports for reports in self._reports)

    def _failed(self, nodeid: str) -> bool:
        return any(reports[nodeid]["outcome"] == "failed" for reports in self._reports if nodeid in reports)

    def _outcome(self, nodeid: str) -> str:
        outcomes = {reports[nodeid]["outcome"] for reports in self._reports}
        return "skipped" if outcomes == {"skipped"} else "passed"

    def _read(self) -> None:
        for rank, reports in enumerate(self._reports):
            path = self._folder / f"{rank}.jsonl"
            if path.exists():
                for line in path.read_text().splitlines(keepends=True):
                    if line.endswith("\n"):
                        report = json.loads(line)
                        reports[report["nodeid"]] = report

    def _story(self, nodeid: str) -> str:
        """Why the test failed, as far as anyone can tell."""
        missing = [rank for rank, reports in enumerate(self._reports) if nodeid not in reports]
        parts = []
        for rank, reports in enumerate(self._reports):
            if nodeid in reports and reports[nodeid]["text"]:
                parts.append(f"----- rank {rank} {reports[nodeid]['outcome']}\n{reports[nodeid]['text']}")
        if missing:
            ended = "the job ended" if not self._job.running() else "the time was up"
            parts.append(f"----- {ended} before rank(s) {missing} came to an end of the test")
            self._job.take_stacks()
        self._job.kill()
        parts.append(self._job.finish(0.0).report())
        return "\n".join(parts)
