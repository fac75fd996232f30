"""How many threads torch uses for the data plane: one.

The ranks of a node already divide the work, and a team of OpenMP threads for each
of them, on top of those of the computation, makes moving a chunk twenty times
slower. torch's setting is partly of the thread and partly of the process; this
changes the calling thread's part only.
"""

from __future__ import annotations

import threading

import torch

_lock = threading.Lock()


def use_one_thread() -> None:
    """From now on, torch runs what the calling thread asks for on that thread alone.

    `torch.set_num_threads` sets the calling thread, and the default of threads that
    have not used torch yet: a thread of that kind is used to read the default and
    to put it back.
    """
    with _lock:
        default = _in_a_fresh_thread(None)
        # A thread takes the default on its first use of torch: later, that would undo the setting.
        torch.get_num_threads()
        torch.set_num_threads(1)
        _in_a_fresh_thread(default)


def _in_a_fresh_thread(number: int | None) -> int:
    """Set the default if a number is given; return it."""
    seen: list[int] = []

    def work() -> None:
        if number is not None:
            torch.set_num_threads(number)
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return seen[0]
