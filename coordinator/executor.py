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
    """

    request: Request
    inputs: Sequence[Any]
    outputs: Any
    handle: Handle
    enqueued_at: float
    extra: Any = None
    unpack: Callable[[list[Any]], Any] | None = None
    executed: int = 0

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


class Executor(Protocol):
    """Runs agreed responses. `fusion/` implements it."""

    def execute(self, response: Response, entries: Sequence[Entry]) -> None:
        """Run one response: read `entries[i].inputs[part.index]` and write
        `entries[i].outputs[part.index]` for each `part = response.parts[i]`.

        `entries[i]` belongs to `response.parts[i]`. Returns when all outputs are
        complete on this rank. An error that every rank raises alike for this
        response (`FusionError` or `ValueError`, before any data moved) fails
        only its entries; any other exception is taken as the end of the runtime.
        """
        ...

    def absent(self, request: Request, handle: Handle) -> Entry:
        """An entry for a rank that has joined: inputs that change nothing (zero for
        a sum, no rows for an all-gather), outputs that nobody reads."""
        ...

    def close(self) -> None:
        """Give back buffers. Collective: every rank calls it at the same point."""
        ...
