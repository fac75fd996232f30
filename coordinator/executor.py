"""The interface between the control plane and whatever moves the data.

`coordinator/` calls an `Executor` from the cycle thread only, one response at a
time, in the order that all ranks share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from coordinator.handle import Handle
from coordinator.messages import Request, Response


class Entry(msgspec.Struct, eq=False, gc=False):
    """One submitted request on this rank, with its tensors and its handle.

    The entry owns a reference to the tensors until it completes, so that a
    caller may drop them at once; nothing keeps it after that.

    Attributes:
        inputs: the tensors to read, one for each shape of the request.
        outputs: where results go, one for each shape; a list where the executor
            makes the outputs itself (an all-gather) and there is None so far. The
            same object as the input for an in-place operation.
        enqueued_at: `time.monotonic()` of the submission.
        extra: what a collective needs beside (the splits of an all-to-all).
        unpack: turns the list of outputs into what the handle returns; None for the first output.
        executed: how many parts have been executed.
        ready: what must have happened before the inputs may be read; the executor knows what it is.
    """

    request: Request
    inputs: Sequence[Any]
    outputs: Any
    handle: Handle
    enqueued_at: float
    extra: Any = None
    unpack: Callable[[list[Any]], Any] | None = None
    executed: int = 0
    ready: Any = None

    def launched(self, work: Work) -> None:
        """Let a caller that waits for the output have it before it is complete."""

        def early() -> Any:
            work.join()
            return self.outputs[0] if self.unpack is None else self.unpack(self.outputs)

        self.handle.set_early(early)

    def complete(self) -> None:
        """Complete the handle with the output."""
        if self.unpack is None:
            self.handle.set_result(self.outputs[0])
        else:
            self.convert()

    def convert(self) -> None:
        """Complete the handle with what `unpack` makes of the outputs, if that is asked for."""
        if self.unpack is None:
            return
        try:
            result = self.unpack(self.outputs)
        except Exception as error:  # noqa: BLE001 - the data arrived; only this caller's conversion failed.
            self.handle.set_exception(error)
        else:
            self.handle.set_result(result)


def last_parts(entries: list[Entry]) -> list[Entry]:
    """Of entries that each had a part run: those of which it was the last one."""
    finished = []
    for entry in entries:
        entry.executed += 1
        if entry.executed == len(entry.request.shapes):
            finished.append(entry)
    return finished


class Work(Protocol):
    """A response that is under way: a device has been given it, or its ring has begun."""

    @property
    def early(self) -> bool:
        """Whether callers may have the outputs before they are complete, by `join`."""
        ...

    def join(self) -> None:
        """On any thread: what the caller gives to the device from now on comes after it."""
        ...

    def done(self) -> bool:
        """Whether the outputs are complete; asked until it is true. Raises what went wrong,
        which is taken as the end of the runtime."""
        ...

    def rest(self) -> float:
        """Seconds after which asking again is worth while; 0 if that is not known."""
        ...

    def abandon(self) -> None:
        """Nobody asks any more: let go of the tensors as soon as the device permits."""
        ...


class Executor(Protocol):
    """Runs agreed responses. `fusion/` implements it."""

    def execute(self, response: Response, entries: Sequence[Entry]) -> Work | None:
        """Run one response: read `entries[i].inputs[part.index]` and write
        `entries[i].outputs[part.index]` for each `part = response.parts[i]`.

        `entries[i]` belongs to `response.parts[i]`. Returns None when all outputs are
        complete on this rank, or what is still under way; such responses complete in the
        order in which they were given. An error that every rank raises alike for this
        response (`FusionError` or `ValueError`, before any data moved) fails
        only its entries; any other exception is taken as the end of the runtime.
        """
        ...

    def absent(self, request: Request, handle: Handle) -> Entry:
        """An entry for a rank that has joined: inputs that change nothing (zero for
        a sum, no rows for an all-gather), outputs that nobody reads."""
        ...

    def close(self) -> None:
        """Give back buffers. Collective: every rank calls it at the same point, with nothing under way."""
        ...

    def abort(self) -> None:
        """The runtime has failed: free what devices wait for. Not collective; `close` is not called."""
        ...
