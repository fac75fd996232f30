"""How a rank leaves the job when its interpreter ends, whatever ended it.

A rank that ends well tells the others and then waits for them in MPI_Finalize, as
any MPI program does. A rank that ends by an uncaught exception or by `sys.exit`
with a failure code tells the others, gives them a moment to report, and then
aborts the job, because MPI_Finalize would wait for ranks that wait for it.

`sys.excepthook` is chained, never lost. Children made by `fork` run none of this.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

logger = logging.getLogger("fusion")

_INTERRUPTED = 130


class ExitWatch:
    """Learns how this process ends and acts on it. One a process, made by `init`.

    Args:
        leave: called with the reason and a time limit in seconds (None when the
            end is a good one); takes the runtime down and says whether the ranks
            agreed to it.
        abort: called with an exit code; ends all ranks.
        grace_s: seconds that the other ranks get to report before the abort.
    """

    def __init__(
        self,
        leave: Callable[[str, float | None], bool],
        abort: Callable[[int], None],
        grace_s: float,
    ) -> None:
        self.leave = leave
        self.abort = abort
        self.grace_s = grace_s
        self._failure: tuple[str, int] | None = None
        self._process = os.getpid()

    def install(self) -> None:
        """Hook into this interpreter's end."""
        self._previous_hook = sys.excepthook
        sys.excepthook = self._on_exception
        self._previous_exit = sys.exit
        sys.exit = self._exit  # type: ignore[assignment]
        atexit.register(self._at_exit)

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        self._previous_hook(kind, error, traceback)
        if threading.current_thread() is threading.main_thread():
            code = _INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1
            self._failure = (f"it raised {kind.__name__}: {error}", code)

    def _exit(self, code: object = None) -> None:
        raise _WatchedExit(code, self._on_exit_code)

    def _on_exit_code(self, code: object) -> None:
        status = code if isinstance(code, int) else int(code is not None)
        if status:
            self._failure = (f"it exited with code {status}", status)

    def _at_exit(self) -> None:
        if os.getpid() != self._process:
            return
        if self._failure is None:
            if self.leave("it reached the end of its program", None):
                return
            self._failure = ("its runtime had failed, so MPI cannot be finalized", 1)
        reason, code = self._failure
        sys.stderr.flush()
        deadline = time.monotonic() + self.grace_s
        self.leave(reason, self.grace_s)
        time.sleep(max(0.0, deadline - time.monotonic()))
        logger.error("this rank ends the job: %s", reason)
        self.abort(code)


class _WatchedExit(SystemExit):
    """A `SystemExit` that notices when the interpreter itself reads its code.

    No hook is called for `SystemExit`, and a program may catch one and go on. The
    interpreter reads `code` once the exception has left the last Python frame,
    which is how that is told from a caller who looks at it.
    """

    def __init__(self, code: object, notify: Callable[[object], None]) -> None:
        super().__init__(code)
        self._code = code
        self._notify = notify

    @property
    def code(self) -> object:  # type: ignore[override]
        try:
            sys._getframe(1)
        except ValueError:
            self._notify(self._code)
        return self._code
