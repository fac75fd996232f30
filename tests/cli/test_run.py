"""`fusion run` with real ranks, under whichever MPI this environment has."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.support import FUSION, TIMEOUT_S, environment, fusion, is_alive, needs_launcher, wait_until

pytestmark = [
    needs_launcher,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="process trees are read from /proc"),
]

# A rank that says who it is in a file, and then waits to be ended.
WAITING = """
import os, signal, sys, time
if sys.argv[2:]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
path = os.path.join(sys.argv[1], str(os.getpid()))
open(path + ".new", "w").close()
os.rename(path + ".new", path + ".pid")
time.sleep(600)
"""


@pytest.fixture
def waiting(tmp_path: Path) -> Path:
    script = tmp_path / "waiting.py"
    script.write_text(WAITING)
    return script


@pytest.fixture
def pids(tmp_path: Path) -> Iterator[Path]:
    """A folder for the ranks' process ids; no rank survives the test."""
    folder = tmp_path / "pids"
    folder.mkdir()
    yield folder
    for pid in _ranks(folder):
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)


def _ranks(folder: Path) -> list[int]:
    return [int(path.stem) for path in folder.glob("*.pid")]


def _start(*words: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*FUSION, "run", "-np", "2", *map(str, words)],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _lines(text: str) -> list[str]:
    """Lines of output without the prefix that names the rank."""
    return sorted(re.sub(r"^\[[\d,]+\](<\w+>: ?)? ?", "", line) for line in text.splitlines())


def test_each_line_begins_with_the_rank_that_wrote_it() -> None:
    done = fusion("run", "-np", 2, "echo", "hello")
    assert done.returncode == 0
    ranks = [re.match(r"\[(?:\d+,)?(\d+)\].*hello$", line) for line in done.stdout.splitlines()]
    assert sorted(found[1] for found in ranks if found) == ["0", "1"]


def test_the_prefix_can_be_switched_off() -> None:
    assert fusion("run", "-np", 2, "--no-prefix", "echo", "hello").stdout == "hello\nhello\n"


def test_a_script_gets_its_arguments_and_this_python(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.write_text("import sys; print(sys.executable, *sys.argv[1:], flush=True)\n")
    done = fusion("run", "-np", 2, script, "--lr", 1, "--", "-np", 3)
    assert _lines(done.stdout) == [f"{sys.executable} --lr 1 -- -np 3"] * 2


def test_a_command_finds_the_programs_of_this_environment_first(tmp_path: Path) -> None:
    code = "import sys; print(sys.prefix, flush=True)"
    done = fusion("run", "-np", 2, "python", "-c", code, PATH="/usr/bin:/bin")
    assert _lines(done.stdout) == [sys.prefix] * 2


def test_after_two_dashes_everything_goes_to_mpirun() -> None:
    done = fusion("run", "-np", 2, "--show", "--", "--some-option", "x", "train.py", "--", "y")
    assert done.stdout.endswith(" --some-option x train.py -- y\n")


def test_a_verbatim_tail_starts_its_program() -> None:
    assert _lines(fusion("run", "-np", 2, "--", "echo", "hello").stdout) == ["hello", "hello"]


def test_extra_options_for_mpirun_are_split_like_a_shell_does() -> None:
    done = fusion("run", "-np", 2, "--mpi-arg", "--a 'b c'", "--mpi-arg=-d", "--show", "echo")
    assert done.stdout.endswith(" --a 'b c' -d echo\n")


def test_hosts_may_come_from_a_file(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=2\n")
    done = fusion("run", "-np", 2, "--hostfile", hosts, "echo", "hello")
    assert _lines(done.stdout) == ["hello", "hello"]


def test_more_ranks_than_cores_run_on_this_machine() -> None:
    ranks = (os.cpu_count() or 1) + 1
    done = fusion("run", "-np", ranks, "-H", "localhost:1", "echo", "hello")
    assert _lines(done.stdout) == ["hello"] * ranks


@pytest.mark.parametrize("status", [0, 1, 7])
def test_the_exit_status_of_the_ranks_comes_through(status: int) -> None:
    assert fusion("run", "-np", 2, "sh", "-c", f"exit {status}").returncode == status


def test_what_ranks_write_to_standard_error_comes_through() -> None:
    done = fusion("run", "-np", 2, "sh", "-c", "echo trouble >&2")
    assert "trouble" in done.stderr
    assert "trouble" not in done.stdout


def test_the_ranks_see_the_file_that_was_named_and_no_setting_that_was_not(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("chunk_kb: 7\n")
    code = "import os; print(*sorted(f'{k}={v}' for k, v in os.environ.items() if k.startswith('FUSION_')))"
    done = fusion("run", "-np", 2, "--config", tmp_path / "c.yaml", "python", "-c", code)
    assert _lines(done.stdout) == [f"FUSION_CONFIG={tmp_path / 'c.yaml'}"] * 2
    assert _lines(fusion("run", "-np", 2, "python", "-c", code).stdout) == ["", ""]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-np", "2", "--config", "{dir}/c.yaml", "echo"], "c.yaml:2: unknown key 'chunk'"),
        (["-np", "2", "{dir}/gone.py"], "gone.py: there is no such file"),
        (["-np", "2", "no-such-program"], "no-such-program: no such program on PATH"),
        (["-np", "2", "-H", "a", "--hostfile", "b", "echo"], "give -H or --hostfile, not both"),
        (["-np", "2", "-H", "a:x", "echo"], "expected host or host:slots"),
        (["-np", "0", "echo"], "-np"),
        (["-np", "2"], "PROGRAM"),
        (["-np", "2", "--"], "PROGRAM"),
        (["echo"], "-np"),
    ],
)
def test_a_job_that_cannot_start_is_refused_in_one_message(
    tmp_path: Path, words: list[str], says: str
) -> None:
    (tmp_path / "c.yaml").write_text("# settings\nchunk: 7\n")
    done = fusion("run", *(word.format(dir=tmp_path) for word in words))
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interruption_ends_all_ranks(number: signal.Signals, waiting: Path, pids: Path) -> None:
    process = _start(waiting, pids)
    wait_until(lambda: len(_ranks(pids)) == 2, "two ranks")
    process.send_signal(number)
    assert process.wait(TIMEOUT_S) == 128 + number
    assert not any(map(is_alive, _ranks(pids)))


def test_ranks_that_ignore_the_signal_end_too(waiting: Path, pids: Path) -> None:
    process = _start(waiting, pids, "stubborn")
    wait_until(lambda: len(_ranks(pids)) == 2, "two ranks")
    process.terminate()
    assert process.wait(TIMEOUT_S) == 128 + signal.SIGTERM
    assert not any(map(is_alive, _ranks(pids)))


def test_ranks_end_when_mpirun_is_killed(waiting: Path, pids: Path) -> None:
    process = _start(waiting, pids)
    wait_until(lambda: len(_ranks(pids)) == 2, "two ranks")
    (mpirun,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(mpirun), signal.SIGKILL)
    assert process.wait(TIMEOUT_S) == 128 + signal.SIGKILL
    assert not any(map(is_alive, _ranks(pids)))


def test_ranks_end_when_the_command_itself_is_killed(waiting: Path, pids: Path) -> None:
    process = _start(waiting, pids)
    wait_until(lambda: len(_ranks(pids)) == 2, "two ranks")
    process.kill()
    wait_until(lambda: not any(map(is_alive, _ranks(pids))), "the end of the ranks")


def test_control_c_at_a_terminal_ends_all_ranks(waiting: Path, pids: Path) -> None:
    child, terminal = pty.fork()
    if child == 0:
        line = [*FUSION, "run", "-np", "2", str(waiting), str(pids)]
        os.execve(line[0], line, environment())
    wait_until(lambda: len(_ranks(pids)) == 2, "two ranks")
    os.write(terminal, b"\x03")
    _, status = os.waitpid(child, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGINT
    assert not any(map(is_alive, _ranks(pids)))


def test_programs_that_outlive_a_job_that_ended_by_itself_are_left_alone(tmp_path: Path) -> None:
    """Only an interrupted job is swept: a rank may start a daemon on purpose."""
    path = tmp_path / "pid"
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True, stdout=subprocess.DEVNULL,"
        " stderr=subprocess.DEVNULL)\n"
        f"open({str(path)!r}, 'w').write(str(child.pid))\n"
    )
    assert fusion("run", "-np", 1, "python", "-c", code).returncode == 0
    pid = int(path.read_text())
    assert is_alive(pid)
    os.kill(pid, signal.SIGKILL)
