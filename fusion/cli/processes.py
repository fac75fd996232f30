"""Runs one command so that nothing it started outlives it.

Called by `fusion run` from the main thread. An interruption (SIGINT, SIGTERM,
SIGHUP) is handed to the command; whatever is left of it after the grace period is
killed. mpirun alone does not guarantee that: MPICH's waits for ever for a rank that
ignores SIGTERM, and the ranks of an Open MPI mpirun that is killed go on.

On Linux this process adopts the orphans among its descendants (prctl(2),
PR_SET_CHILD_SUBREAPER), so that each can be found, and the command gets SIGTERM
should this process itself be killed. Elsewhere only the command is ended.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO

Relay = Callable[[IO[bytes], int], None]
STDOUT = 1
STDERR = 2
_SET_PARENT_DEATH_SIGNAL = 1
_SET_CHILD_SUBREAPER = 36
_INTERRUPTIONS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def supervise(
    command: Sequence[str], environ: Mapping[str, str], *, relay: Relay | None = None, grace_s: float = 5.0
) -> int:
    """Run `command` to its end and return its exit status; 128 + n if signal n ended it.

    Args:
        relay: copies a stream of the command to a file descriptor; without one, the
            command writes to ours itself.
        grace_s: how long an interrupted command may take to end its ranks. A second
            interruption ends the wait.
    """
    prctl = _prctl()
    prctl(_SET_CHILD_SUBREAPER, 1)
    supervisor = _Supervisor(grace_s)
    with supervisor.handling_signals():
        # Unsafe with threads, says the documentation of preexec_fn; there are none yet, and the fork must
        # be made by the main thread, whose end is the end of this process.
        process = subprocess.Popen(
            command,
            env=dict(environ),
            stdout=subprocess.PIPE if relay else None,
            stderr=subprocess.PIPE if relay else None,
            preexec_fn=lambda: prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM),  # noqa: PLW1509
        )
        streams = _relaying(process, relay) if relay else []
        status = supervisor.wait(process)
        for stream in streams:
            # Whatever still holds the stream after that outlived the job on purpose.
            stream.join(grace_s)
        return status


def _relaying(process: subprocess.Popen[bytes], relay: Relay) -> list[threading.Thread]:
    assert process.stdout is not None
    assert process.stderr is not None
    threads = [
        threading.Thread(target=relay, args=(process.stdout, STDOUT), daemon=True),
        threading.Thread(target=relay, args=(process.stderr, STDERR), daemon=True),
    ]
    for thread in threads:
        thread.start()
    return threads


class _Supervisor:
    """The one command being run, and the interruption it got, if any."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._process: subprocess.Popen[bytes] | None = None
        self._interruption: int | None = None
        self._timer = threading.Timer(grace_s, kill_descendants)
        self._timer.daemon = True

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._on_signal) for number in _INTERRUPTIONS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def wait(self, process: subprocess.Popen[bytes]) -> int:
        self._process = process
        if self._interruption is not None:  # came before there was a process to tell
            self._pass_on(self._interruption)
        status = process.wait()
        self._timer.cancel()
        if self._interruption is not None or status < 0:
            _end_leftovers(self._grace_s)
        if self._interruption is not None:
            return 128 + self._interruption
        return 128 - status if status < 0 else status

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._interruption is not None:
            kill_descendants()
            return
        self._interruption = number
        if self._process is not None:
            self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        assert self._process is not None
        if not (number == signal.SIGINT and _in_foreground_of_terminal()):
            self._process.send_signal(number)
        self._timer.start()


def _in_foreground_of_terminal() -> bool:
    """Whether the terminal sends Ctrl-C to this process and to the command alike.

    A second SIGINT would make mpirun leave without ending its ranks.
    """
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _end_leftovers(grace_s: float) -> None:
    """Wait for the ranks that are still ending, then kill them."""
    deadline = time.monotonic() + grace_s
    while descendants(os.getpid()):
        if time.monotonic() > deadline:
            kill_descendants()
        _reap()
        time.sleep(0.02)


def kill_descendants() -> None:
    """Kill every process that this one started, directly or not."""
    for pid in descendants(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _reap() -> None:
    """Collect adopted children that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def descendants(root: int) -> list[int]:
    """Living processes below `root`, from /proc; empty where there is none."""
    children: dict[int, list[int]] = {}
    for pid, parent in _living():
        children.setdefault(parent, []).append(pid)
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]


def _living() -> Iterator[tuple[int, int]]:
    """Process id and parent of all processes that are not zombies."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name in parentheses may hold anything; state and parent follow it (proc(5)).
            state, parent = entry.read_text().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue  # ended meanwhile
        if state != "Z":
            yield int(entry.parent.name), int(parent)


def _prctl() -> Callable[[int, int], int]:
    if not sys.platform.startswith("linux"):
        return lambda _option, _value: 0
    function: Callable[[int, int], int] = ctypes.CDLL(None, use_errno=True).prctl
    return function
