"""Handles: the future that every asynchronous operation returns.

A handle has the interface of `concurrent.futures.Future`. It is a class of its
own because a training step makes hundreds of them: a `Future` builds a lock and
a condition each, these share the one `Bell` of their runtime, so that making a
handle costs an object and completing a thousand of them wakes each waiter once.

Guarantees: a handle completes exactly once, on the cycle thread; `done()` is
true only after the output is complete; every method may be called from any
thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

logger = logging.getLogger("fusion")

_PENDING = object()
_FAILED = object()


class Bell:
    """What all waiters of one runtime sleep on.

    `urge` is called, outside the lock, by a waiter about to sleep: the cycle
    thread then need not wait for more tensors to fuse.
    """

    def __init__(self, urge: Callable[[], None] = lambda: None) -> None:
        self.urge = urge
        self.lock = threading.Lock()
        self._condition = threading.Condition(self.lock)

    def ring(self) -> None:
        """Wake every waiter; called after handles were completed."""
        with self._condition:
            self._condition.notify_all()

    def wait_until(self, done: Callable[[], bool], timeout: float | None) -> bool:
        """Sleep until `done()` or until `timeout` seconds are over; says which."""
        if done():
            return True
        self.urge()
        with self._condition:
            return self._condition.wait_for(done, timeout)


class Handle(msgspec.Struct, eq=False, gc=False):
    """The future result of one operation.

    A msgspec struct that the garbage collector does not track: it is made in a third
    of the time of a class with an `__init__`, and a thousand of them do not start a
    collection. So do not keep a handle as an attribute of its own result: that
    circle would never be collected.

    Attributes:
        name: the tensor's name, as other ranks know it.
    """

    name: str
    _bell: Bell
    _result: Any = _PENDING
    _error: BaseException | None = None
    _callbacks: list[Callable[[Handle], None]] | None = None
    _early: Callable[[], Any] | None = None
    """Gives the output while a device still works on it."""

    def __repr__(self) -> str:
        state = "pending" if not self.done() else "failed" if self._error else "done"
        return f"<Handle {self.name!r} {state}>"

    def done(self) -> bool:
        """Whether the operation has completed or failed."""
        return self._result is not _PENDING

    def running(self) -> bool:
        """Whether the operation is still pending."""
        return not self.done()

    def cancel(self) -> bool:
        """Always false: an operation other ranks may have begun cannot be undone."""
        return False

    def cancelled(self) -> bool:
        """Always false, see `cancel`."""
        return False

    def result(self, timeout: float | None = None) -> Any:
        """The output, waiting for it at most `timeout` seconds.

        Of tensors on a GPU the output is there when the GPU has been given the work: what this
        thread's current stream is given afterwards sees it complete. `done()` says whether it is.

        Raises:
            TimeoutError: it is not there yet; the operation goes on.
            FusionError: the operation failed; the message says why.
        """
        if self._result is _PENDING:
            self._wait(timeout)
            early = self._early
            if early is not None and self._result is _PENDING:
                return early()
        if self._error is not None:
            raise self._error.with_traceback(None)  # Many handles share it: no frames.
        return self._result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error the operation failed with, or None; waits as `result` does."""
        if self._result is _PENDING:
            self._wait(timeout)
        return self._error

    def add_done_callback(self, callback: Callable[[Handle], None]) -> None:
        """Call `callback(handle)` on completion, at once if it is complete already.

        It runs on the cycle thread and must not wait for another handle.
        """
        with self._bell.lock:
            if self._callbacks is None:
                self._callbacks = []
        self._callbacks.append(callback)
        if self.done():
            self._call_back()

    def set_result(self, result: Any) -> None:
        """Complete with an output. For the runtime; the caller then rings the bell."""
        self._result = result
        self._early = None
        if self._callbacks is not None:
            self._call_back()

    def set_early(self, early: Callable[[], Any]) -> None:
        """Let waiters have what `early` returns, on their own threads, before the handle is done.
        For the runtime; the caller then rings the bell."""
        self._early = early

    def set_exception(self, error: BaseException) -> None:
        """Complete with an error. For the runtime; the caller then rings the bell."""
        self._error = error
        self.set_result(_FAILED)

    def _wait(self, timeout: float | None) -> None:
        if not self._bell.wait_until(self._at_hand, timeout):
            raise TimeoutError(f"'{self.name}' is not complete after {timeout} s; it is still pending")

    def _at_hand(self) -> bool:
        return self._result is not _PENDING or self._early is not None

    def _call_back(self) -> None:
        """Call what was added so far; a callback added meanwhile is called once, here or by who added it."""
        callbacks = self._callbacks
        while callbacks:
            try:
                callback = callbacks.pop(0)
            except IndexError:  # The other thread took the last one.
                return
            try:
                callback(self)
            except Exception:  # As in `concurrent.futures`: a callback cannot harm the runtime.
                logger.exception("a callback of '%s' failed", self.name)


def complete_all(handles: Sequence[Handle], results: Iterable[Any]) -> None:
    """Complete each handle with its output, as `set_result` does."""
    for handle, result in zip(handles, results, strict=True):
        handle._result = result
        if handle._callbacks is not None:
            handle._call_back()


def wait_all(handles: list[Handle], timeout: float | None = None) -> None:
    """Wait until every handle is complete, failed ones included.

    Raises:
        TimeoutError: some handle is still pending after `timeout` seconds.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    for handle in handles:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        handle.exception(left)
