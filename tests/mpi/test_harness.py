"""The harness itself: what it reports when ranks fail, die or hang. Uses MPI without the runtime."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.conftest import RunRanks
from tests.hosts import TwoHosts
from tests.launch import environment
from tests.ranks import ranks

INIT = None


@ranks(1, 2, 3, 4)
def test_a_rank_test_runs_at_each_number_of_ranks(rank_count: int) -> None:
    from mpi4py import MPI

    assert MPI.COMM_WORLD.size == rank_count


@ranks(2)
@pytest.mark.parametrize("value", [3, 5])
def test_parameters_go_with_ranks(value: int) -> None:
    from mpi4py import MPI

    assert MPI.COMM_WORLD.allreduce(value) == 2 * value


@ranks(2)
def test_a_skip_on_every_rank_is_a_skip() -> None:
    pytest.skip("to show that skipping works")


HEAD = """
import os, time
import pytest
import tests.ranks
from tests.ranks import ranks

tests.ranks.TEST_S, tests.ranks.STARTUP_S, tests.ranks.GRACE_S = 3.0, 10.0, 1.0

@pytest.fixture
def comm():
    from mpi4py import MPI
    return MPI.COMM_WORLD

def nobody_waits_longer_than_the_limit():
    time.sleep(60)
"""


def pytest_says(folder: Path, text: str) -> str:
    """The output of a pytest over these rank tests, most of which are made to go wrong."""
    (folder / "conftest.py").write_text("from tests.conftest import *\n")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = ranks\n")
    (folder / "test_made.py").write_text(HEAD + textwrap.dedent(text))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", str(folder)]
    # In a CI, pytest says a failure twice: its summary is then no longer cut to one line.
    env = {name: value for name, value in environment().items() if name not in {"CI", "BUILD_NUMBER"}}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=env)
    return done.stdout


def test_a_failure_on_one_rank_is_a_failure_and_shows_each_rank(tmp_path: Path) -> None:
    said = pytest_says(
        tmp_path,
        """
        @ranks(2)
        def test_fails(comm):
            print("hello from", comm.rank)
            assert comm.rank != 1, "not this one"

        @ranks(2)
        def test_after(comm):
            comm.barrier()
        """,
    )
    assert "FAILED test_made.py::test_fails[np2]" in said
    assert "rank 1 failed" in said and "not this one" in said
    assert "rank 0 | hello from 0" in said and "rank 1 | hello from 1" in said
    assert "PASSED test_made.py::test_after[np2]" in said


def test_a_rank_that_waits_for_a_failed_one_does_not_hang_the_tests(tmp_path: Path) -> None:
    said = pytest_says(
        tmp_path,
        """
        @ranks(2)
        def test_fails(comm):
            assert comm.rank != 1, "not this one"
            comm.barrier()
        """,
    )
    assert "rank 1 failed" in said and "not this one" in said
    assert "before rank(s) [0] came to an end" in said
    assert "in test_fails" in said or "test_fails (" in said


def test_a_test_that_hangs_shows_the_stack_of_every_rank(tmp_path: Path) -> None:
    said = pytest_says(
        tmp_path,
        """
        @ranks(2)
        def test_hangs(comm):
            nobody_waits_longer_than_the_limit()

        @ranks(2)
        def test_after(comm):
            comm.barrier()
        """,
    )
    assert "FAILED test_made.py::test_hangs[np2]" in said
    assert "the time was up before rank(s) [0, 1]" in said
    assert said.count("nobody_waits_longer_than_the_limit (") == 2
    assert "PASSED test_made.py::test_after[np2]" in said


def test_a_rank_that_dies_is_a_failure(tmp_path: Path) -> None:
    said = pytest_says(
        tmp_path,
        """
        @ranks(2)
        def test_dies(comm):
            if comm.rank == 0:
                os.kill(os.getpid(), 9)
            comm.barrier()

        @ranks(2)
        def test_after(comm):
            comm.barrier()
        """,
    )
    assert "FAILED test_made.py::test_dies[np2]" in said and "the job ended before" in said
    assert "PASSED test_made.py::test_after[np2]" in said


def test_ranks_that_cannot_end_are_a_failure(tmp_path: Path) -> None:
    said = pytest_says(
        tmp_path,
        """
        @ranks(1)
        def test_leaves_something_behind(comm):
            import atexit
            atexit.register(os._exit, 3)
        """,
    )
    assert "FAILED test_made.py::test_leaves_something_behind[np1]" in said
    assert "the ranks did not end well" in said


def test_a_module_that_cannot_be_imported_on_a_rank_is_a_failure(tmp_path: Path) -> None:
    said = pytest_says(
        tmp_path,
        """
        if tests.ranks.inside():
            raise RuntimeError("no such luck")

        @ranks(1)
        def test_something(comm):
            pass
        """,
    )
    assert "FAILED test_made.py::test_something[np1]" in said and "no such luck" in said


def test_rank_tests_between_ordinary_ones_leave_their_fixtures_alone(tmp_path: Path) -> None:
    (tmp_path / "test_next.py").write_text("def test_ordinary():\n    pass\n")
    said = pytest_says(
        tmp_path,
        """
        @pytest.fixture(scope="module")
        def resource():
            yield
            print("given back")

        @pytest.mark.parametrize("_", [0, 1])
        def test_ordinary(resource, _):
            pass

        @ranks(1)
        def test_something(comm):
            pass
        """,
    )
    assert "4 passed" in said and "error" not in said
    assert said.count("given back") == 1


def test_a_program_returns_what_each_rank_wrote(run_ranks: RunRanks) -> None:
    done = run_ranks("from mpi4py import MPI; print('rank', MPI.COMM_WORLD.rank)", 2)
    assert done.status == 0
    assert [output.strip() for output in done.outputs] == ["rank 0", "rank 1"]


def test_a_program_may_be_expected_to_fail(run_ranks: RunRanks) -> None:
    done = run_ranks("import sys; sys.exit(7)", 1, expect_failure=True)
    assert done.status == 7


def test_a_failure_that_was_not_expected_fails_the_test(run_ranks: RunRanks) -> None:
    with pytest.raises(pytest.fail.Exception, match="expected to end well"):
        run_ranks("raise SystemExit(7)", 1)


def test_a_program_that_hangs_is_killed_and_its_stacks_are_shown(run_ranks: RunRanks) -> None:
    program = """
        import time

        def sleeps_for_a_minute():
            time.sleep(60)

        sleeps_for_a_minute()
    """
    done = run_ranks(program, 2, timeout=3, expect_failure=True, expect_timeout=True)
    assert done.stacks.count("sleeps_for_a_minute (") == 2


def test_two_hosts_are_two_nodes_joined_by_a_network(run_ranks: RunRanks, two_hosts: TwoHosts) -> None:
    program = """
        import numpy as np
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        total = np.empty(50_000)
        world.Allreduce(np.full(50_000, world.rank + 1.0), total)
        node = world.Split_type(MPI.COMM_TYPE_SHARED)
        print(MPI.Get_processor_name(), node.size, total.min(), total.max())
    """
    done = run_ranks(program, 4, launcher=two_hosts)
    first, second = two_hosts.names
    said = [output.strip() for output in done.outputs]
    assert said == [f"{first} 2 10.0 10.0"] * 2 + [f"{second} 2 10.0 10.0"] * 2


def test_the_hosts_are_gone_afterwards(two_hosts: TwoHosts) -> None:
    two_hosts.close()
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not any(name in listed for name in two_hosts.names)
