"""Messages between single ranks, beside the runtime and never in its way.

A `Link` owns a communicator of its own and the one thread that calls MPI on it.
Anybody sends from any thread, without waiting; what arrives is handed to whoever
registered its address, on the link's thread. Sends are non-blocking and arrivals are
probed for, so a rank that does not listen delays nobody but itself.

Guarantees: messages from one rank to one address arrive in the order they were
sent. A message to an address of the same rank does not touch MPI. `check` raises once
a rank has left the job or this thread has failed, so a wait that calls it now and then
does not outlive its cause.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coordinator.doorbell import Doorbell
from coordinator.errors import FusionError
from coordinator.waiting import patience
from fusion.federated.messages import PREFIX, Message, prefix, unpack

if TYPE_CHECKING:
    from mpi4py import MPI

_LONGEST_PIECE = 1 << 30
"""Bytes of one MPI message; its count must fit an int in every MPI."""
_TAG = 1
_ABANDON_S = 1.0


class Link:
    """Sends and delivers messages for this rank. Making and closing one is collective.

    Args:
        comm: duplicated here.
        ended: tells what has ended the runtime, if anything has: a rank that left, for instance.
        longest_piece: bytes; longer messages travel in pieces.

    Attributes:
        sent_bytes, received_bytes: over MPI, so far.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        ended: Callable[[], FusionError | None],
        longest_piece: int = _LONGEST_PIECE,
    ) -> None:
        if longest_piece < PREFIX:
            raise ValueError(
                f"longest_piece must be {PREFIX} or more, the length of a prefix; got {longest_piece}"
            )
        self._comm = comm.Dup()
        self._ended = ended
        self._longest = longest_piece
        self._addresses: dict[int, Callable[[Message], None]] = {}
        self._outgoing: deque[tuple[int, Tensor]] = deque()
        self._in_flight: deque[tuple[MPI.Request, Tensor]] = deque()
        self._partial: dict[int, tuple[Tensor, int]] = {}
        self._doorbell = Doorbell()
        self._closing = threading.Event()
        self._abandoned = False
        self._failure: FusionError | None = None
        self.sent_bytes = self.received_bytes = 0
        self._thread = threading.Thread(target=self._run, name="fusion-link", daemon=True)

    def register(self, address: int, deliver: Callable[[Message], None]) -> None:
        """Deliver what is sent to an address of this rank; before `start`."""
        self._addresses[address] = deliver

    def start(self) -> None:
        """Start to send and to deliver."""
        self._thread.start()

    def send(self, rank: int, message: Tensor) -> None:
        """Send a message, as `messages.pack` makes it; it must not be changed afterwards."""
        self._outgoing.append((rank, message))
        self._doorbell.ring()

    def check(self) -> None:
        """Raise if nothing more can be expected."""
        end = self._failure or self._ended()
        if end is not None:
            raise end

    def close(self) -> None:
        """Send what is left, and give the communicator back; collective.

        Every rank must have received what was sent to it: the protocol on top sees to that.
        """
        self._end()
        self._thread.join()
        self._comm.Free()

    def abandon(self) -> None:
        """End without the other ranks, when one of them has left: what is under way may be lost."""
        self._abandoned = True
        self._end()
        # MPI must not be finalized under a thread that uses it.
        self._thread.join(_ABANDON_S)

    def _end(self) -> None:
        self._closing.set()
        self._doorbell.ring()

    # The link's thread.

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 - whatever it was, nobody may wait for this thread any more.
            self._failure = FusionError(f"messages to other ranks have failed: {error!r}")
            self._failure.__cause__ = error

    def _serve(self) -> None:
        since = time.monotonic()
        while not (self._closing.is_set() and (self._abandoned or self._idle())):
            if self._send_waiting() | self._receive() | self._complete():
                since = time.monotonic()
                continue
            nap = patience(time.monotonic() - since)
            if not nap:
                time.sleep(0)
            elif self._doorbell.wait(nap):
                since = time.monotonic()

    def _idle(self) -> bool:
        return not self._outgoing and not self._in_flight

    def _send_waiting(self) -> bool:
        worked = False
        while self._outgoing:
            rank, message = self._outgoing.popleft()
            worked = True
            if rank == self._comm.rank:
                self._deliver(message)
                continue
            for piece in message.split(self._longest):
                self._in_flight.append((self._comm.Isend(piece.numpy(), dest=rank, tag=_TAG), piece))
            self.sent_bytes += message.numel()
        return worked

    def _complete(self) -> bool:
        before = len(self._in_flight)
        self._in_flight = deque(item for item in self._in_flight if not item[0].Test())
        return len(self._in_flight) < before

    def _receive(self) -> bool:
        from mpi4py import MPI

        status = MPI.Status()
        if not self._comm.Iprobe(MPI.ANY_SOURCE, _TAG, status):
            return False
        source, count = status.source, status.Get_count(MPI.BYTE)
        message, start = self._partial.pop(source, (None, 0))
        if message is None:
            piece = torch.empty(count, dtype=torch.uint8)
            self._comm.Recv(piece.numpy(), source=source, tag=_TAG)
            total = prefix(piece)[2]
            message = piece
            if total > count:
                message = torch.empty(total, dtype=torch.uint8)
                message[:count] = piece
        else:
            self._comm.Recv(message[start : start + count].numpy(), source=source, tag=_TAG)
        self.received_bytes += count
        if start + count < message.numel():
            self._partial[source] = message, start + count
        else:
            self._deliver(message)
        return True

    def _deliver(self, message: Tensor) -> None:
        arrived = unpack(message)
        self._addresses[arrived.address](arrived)
