"""A communicator whose every operation is posted and polled.

Runs on the thread that owns MPI. No call here blocks inside MPI: each waits
through the `Waiter`, which raises when a rank has failed, so the death of one
rank never hangs another. A message carries at most `MAX_MESSAGE_BYTES`, because
MPI counts are 32-bit; what is longer travels as several, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from mpi4py import MPI

from coordinator.errors import FusionError
from coordinator.waiting import Waiter

MAX_MESSAGE_BYTES = 1 << 30
"""Longest message; tests lower it to cover the division of large ones."""

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """The memory of a contiguous one-dimensional tensor, with no copy, whatever its dtype."""
    view: Bytes = tensor.view(torch.uint8).numpy()
    return view


class Channel:
    """One communicator and the `Waiter` that its operations are polled with."""

    def __init__(self, comm: MPI.Comm, waiter: Waiter) -> None:
        self._comm = comm
        self._waiter = waiter
        self.rank: int = comm.rank
        self.size: int = comm.size

    def wait(self, request: MPI.Request) -> None:
        """Return when `request` is complete."""
        self._waiter.until(request.Test)

    def until(self, test: Callable[[], bool], *, expected: float = 0.0) -> None:
        """Return when `test()` is true; see `Waiter.until`."""
        self._waiter.until(test, expected=expected)

    def wait_all(self, requests: Sequence[MPI.Request]) -> None:
        """Return when all `requests` are complete."""
        if requests:
            pending = list(requests)
            self._waiter.until(lambda: MPI.Request.Testall(pending))

    def send(self, tensor: torch.Tensor, to: int, lane: int = 0) -> list[MPI.Request]:
        """Begin sending a flat contiguous tensor, which must stay as it is until complete.

        Messages of one lane arrive in the order of their sends.
        """
        return [self._comm.Isend([part, MPI.BYTE], dest=to, tag=lane) for part in _messages(tensor)]

    def receive(self, tensor: torch.Tensor, source: int, lane: int = 0) -> list[MPI.Request]:
        """Begin receiving into a flat contiguous tensor of the length that is sent."""
        return [self._comm.Irecv([part, MPI.BYTE], source=source, tag=lane) for part in _messages(tensor)]

    def barrier(self) -> None:
        """Return when every rank has called this."""
        if self.size > 1:
            self.wait(self._comm.Ibarrier())

    def all_gather_ints(self, mine: Sequence[int]) -> Ints:
        """The row of each rank, as a matrix; rows are equally long on all ranks."""
        row = np.array(mine, dtype=np.int64)
        rows = np.empty((self.size, len(row)), dtype=np.int64)
        self.wait(self._comm.Iallgather(row, rows))
        return rows

    def all_to_all_ints(self, mine: Sequence[int]) -> Ints:
        """What each rank has for this one, where `mine[r]` is for rank r."""
        row = np.array(mine, dtype=np.int64)
        column = np.empty_like(row)
        self.wait(self._comm.Ialltoall(row, column))
        return column

    def broadcast_text(self, text: str | None, root: int) -> str:
        """The text that `root` has, on every rank."""
        payload = np.frombuffer((text or "").encode(), dtype=np.uint8).copy()
        length = np.array([len(payload)], dtype=np.int64)
        self.wait(self._comm.Ibcast(length, root=root))
        if self.rank != root:
            payload = np.empty(int(length[0]), dtype=np.uint8)
        self.wait(self._comm.Ibcast(payload, root=root))
        return payload.tobytes().decode()

    def agree(self, error: str | None) -> None:
        """Return if no rank has an error; else raise the one of the lowest such rank, on all.

        Raises:
            FusionError: some rank, maybe this one, passed an error.
        """
        mine = np.array([self.size if error is None else self.rank], dtype=np.int64)
        first = np.empty_like(mine)
        self.wait(self._comm.Iallreduce(mine, first, op=MPI.MIN))
        if first[0] < self.size:
            raise FusionError(self.broadcast_text(error, int(first[0])))


def _messages(tensor: torch.Tensor) -> list[Bytes]:
    payload = bytes_of(tensor)
    return [payload[at : at + MAX_MESSAGE_BYTES] for at in range(0, len(payload), MAX_MESSAGE_BYTES)]
