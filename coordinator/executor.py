"""The interface between the control plane and whatever moves the data.

`coordinator/` calls an `Executor` from the cycle thread only, one response at a
time, in the order that all ranks share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from coordinator.handle import Handle
from coordinator.messages import Request, Response


class Entry:
    """One submitted request on this rank, with its tensors and its handle.

    The entry owns a reference to the tensors until it completes, so that a
    caller may drop them at once; on completion it lets go of them.

    Attributes:
        inputs: the tensors to read, one for each shape of the request.
        outputs: where results go, one for each shape, or None where the
            executor makes the output itself (an all-gather). The same object as
            the input for an in-place operation.
        extra: what a collective needs beside (the splits of an all-to-all).
        unpack: turns the list of outputs into what the handle returns.
        remaining: parts not executed yet.
        enqueued_at: `time.monotonic()` of the submission.
    """

    __slots__ = ("enqueued_at", "extra", "handle", "inputs", "outputs", "remaining", "request", "unpack")

    def __init__(
        self,
        request: Request,
        inputs: Sequence[Any],
        outputs: list[Any],
        handle: Handle,
        *,
        enqueued_at: float,
        extra: Any = None,
        unpack: Any = None,
    ) -> None:
        self.request = request
        self.inputs = inputs
        self.outputs = outputs
        self.handle = handle
        self.enqueued_at = enqueued_at
        self.extra = extra
        self.unpack = unpack
        self.remaining = len(request.shapes)

    def release(self) -> None:
        """Let go of the tensors, before the handle completes."""
        self.inputs = ()
        self.outputs = []
        self.extra = None
        self.unpack = None


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
