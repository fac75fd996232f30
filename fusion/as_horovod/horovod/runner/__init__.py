"""Starting a job from Python, which this runtime leaves to its command line."""

from typing import Any, NoReturn


def run(*args: Any, **kwargs: Any) -> NoReturn:
    """Horovod starts ranks from a Python program by this. Here a job is started by a command.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        "horovod.run() is not offered: put the function into a script and start that with "
        "`fusion run --as-horovod -np N script.py`"
    )
