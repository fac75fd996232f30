"""What all tests share: tests inside mpirun, scripts under mpirun, two hosts on one machine."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.examples import same_every_time
from tests.hosts import TwoHosts, why_not
from tests.launch import Finished, Job, Launcher, LocalLauncher
from tests.ranks import COUNT, RankRunner, Verdict, count_of, inside

if not inside():
    same_every_time()

_stack = pytest.StashKey[ExitStack]()
_runner = pytest.StashKey[RankRunner]()

RunRanks = Callable[..., Finished]
"""The type of the fixture `run_ranks`; see there for the arguments."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--two-hosts", action="store_true", help="run only the tests inside mpirun, on two hosts"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is None:
        return
    counts = [int(os.environ[COUNT])] if inside() else list(marker.args)
    if "rank_count" not in metafunc.fixturenames:
        metafunc.fixturenames.append("rank_count")
    metafunc.parametrize("rank_count", counts, ids=[f"np{count}" for count in counts])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    if inside():
        return
    if config.getoption("--two-hosts"):
        alone = [item for item in items if (count_of(item) or 0) < 2]
        config.hook.pytest_deselected(items=alone)
        items[:] = [item for item in items if (count_of(item) or 0) >= 2]
    # One mpirun serves all neighbours of one module and one number of ranks. They come last: pytest takes the
    # fixtures of an ordinary test down on the way to the next ordinary test, and would not from one of these.
    first = {item.path: index for index, item in reversed(list(enumerate(items)))}
    items.sort(key=lambda item: (count_of(item) is not None, first[item.path], count_of(item) or 0))


def pytest_collection_finish(session: pytest.Session) -> None:
    if inside() or not any(count_of(item) for item in session.items):
        return
    stack = session.stash[_stack] = ExitStack()
    launcher: Launcher = LocalLauncher()
    if session.config.getoption("--two-hosts") and not session.config.getoption("--collect-only"):
        reason = why_not()
        if reason is not None:
            raise pytest.UsageError(f"--two-hosts: {reason}")
        launcher = stack.enter_context(TwoHosts())
    runner = session.stash[_runner] = RankRunner(session.items, launcher)
    stack.callback(runner.close)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _stack in session.stash:
        session.stash[_stack].close()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Stand in for the run of a test inside mpirun; its fixtures are set up there, not here."""
    if inside() or count_of(item) is None:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    skip = item.get_closest_marker("skip")
    if skip is not None:
        verdict = Verdict("skipped", str(skip.kwargs.get("reason", "")), 0.0)
    else:
        verdict = item.session.stash[_runner].verdict(item)
    for report in _reports(item, verdict):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _reports(item: pytest.Item, verdict: Verdict) -> Iterator[pytest.TestReport]:
    for when in ("setup", "call", "teardown"):
        call = when == "call"
        yield pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords=dict.fromkeys(item.keywords, 1),
            outcome=verdict.outcome if call else "passed",
            longrepr=_longrepr(item, verdict) if call else None,
            when=when,
            duration=verdict.duration if call else 0.0,
        )


def _longrepr(item: pytest.Item, verdict: Verdict) -> str | tuple[str, int, str] | None:
    if verdict.outcome == "skipped":
        return str(item.path), item.location[1] or 0, f"Skipped: {verdict.text}"
    return verdict.text or None


@pytest.fixture
def run_ranks(tmp_path: Path) -> RunRanks:
    """Run a Python program as several ranks, wait for its end, and return a `Finished`.

    Arguments: the text of the program, or a path to it; `np`; `arguments` for the
    program; `env` with variables beside this process's own; `timeout` in seconds,
    after which every rank's stack is taken and the job is killed; `launcher`,
    for instance `two_hosts`; and `expect_failure`: False (the default) fails the
    test if the job does not end with status 0, True if it does, None accepts
    both. A job that ran out of time fails the test unless `expect_timeout`.
    """
    runs = iter(range(1000))

    def run(
        program: str | Path,
        np: int,
        *,
        arguments: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        timeout: float = 60.0,
        launcher: Launcher | None = None,
        expect_failure: bool | None = False,
        expect_timeout: bool = False,
    ) -> Finished:
        folder = tmp_path / f"run{next(runs)}"
        folder.mkdir()
        if isinstance(program, str):
            path = folder / "program.py"
            path.write_text(textwrap.dedent(program))
            program = path
        command = [sys.executable, str(program), *arguments]
        job = Job(launcher or LocalLauncher(), command, np, folder, env)
        try:
            finished = job.finish(timeout)
        finally:
            job.kill()
        if finished.timed_out and not expect_timeout:
            pytest.fail(f"the ranks were not done after {timeout} s\n{finished.report()}", pytrace=False)
        if expect_failure is not None and (finished.status != 0) != expect_failure:
            wanted = "fail" if expect_failure else "end well"
            pytest.fail(f"the ranks were expected to {wanted}\n{finished.report()}", pytrace=False)
        return finished

    return run


@pytest.fixture
def two_hosts() -> Iterator[TwoHosts]:
    """Two hosts for `run_ranks(..., launcher=two_hosts)`; skips where they cannot be made."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with TwoHosts() as hosts:
        yield hosts
