"""Functions in the background."""

import contextlib
import threading
from collections.abc import Callable, Iterable
from typing import Any


def in_thread(
    target: Callable[..., Any],
    args: Iterable[Any] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Start a function in a thread of its own.

    Args:
        target: the function.
        args: its arguments.
        name: of the thread.
        daemon: do not wait for it when the program ends.
        silent: swallow what it raises.
    """

    def quiet(*given: Any) -> None:
        with contextlib.suppress(Exception):
            target(*given)

    thread = threading.Thread(target=quiet if silent else target, args=tuple(args), name=name, daemon=daemon)
    thread.start()
    return thread
