"""The program of one rank: runs the tests it is told to, and reports each one's outcome.

`tests.ranks` starts it under mpirun. A rank whose test has failed says so and then
stays, doing nothing, until it is killed: leaving would disturb the other ranks,
whose reports are still wanted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.ranks import BEGIN, RESULTS

_SEVERITY = {"passed": 0, "skipped": 1, "failed": 2}


def rank() -> int:
    """This rank's number, known before MPI is initialised."""
    names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
    return int(next((os.environ[name] for name in names if name in os.environ), "0"))


class Reporter:
    """Selects the tests, keeps their order, and writes one line for each."""

    def __init__(self, folder: Path, nodeids: list[str], asker: int) -> None:
        self._asker = asker
        self._begin = folder / BEGIN
        self._file = (folder / f"{rank()}.jsonl").open("w")
        self._order = {nodeid: index for index, nodeid in enumerate(nodeids)}
        self._report: dict[str, Any] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self._order]
        items.sort(key=lambda item: self._order[item.nodeid])

    def pytest_collection_finish(self) -> None:
        while not self._begin.exists():
            if not psutil.pid_exists(self._asker):
                sys.exit("the pytest that started this rank is gone")
            time.sleep(0.01)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._report = {"nodeid": nodeid, "outcome": "passed", "text": ""}
        print(f"\n=== {nodeid}", flush=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if _SEVERITY[report.outcome] > _SEVERITY[self._report["outcome"]]:
            self._report["outcome"] = report.outcome
        if report.failed:
            self._report["text"] += f"{report.longreprtext}\n"
        elif report.skipped and isinstance(report.longrepr, tuple):
            self._report["text"] = report.longrepr[2].removeprefix("Skipped: ")

    def pytest_runtest_logfinish(self) -> None:
        self._file.write(json.dumps(self._report) + "\n")
        self._file.flush()
        while self._report["outcome"] == "failed":
            time.sleep(60)


def main() -> int:
    folder = Path(os.environ[RESULTS])
    task = json.loads((folder / "task.json").read_text())
    arguments = [
        task["module"],
        *("--rootdir", task["rootdir"], "-c", task["inifile"]),
        *("-s", "-q", "--no-header", "-p", "no:cacheprovider", "-o", "addopts="),
    ]
    return int(pytest.main(arguments, plugins=[Reporter(folder, task["nodeids"], task["pid"])]))


if __name__ == "__main__":
    sys.exit(main())
