"""What the link itself can do: one raw TCP connection between two hosts, without MPI.

The first rank of each host takes part, the others only wait at the barrier of
`timing`. Sending has a thread of its own, so that both directions run at once,
as they do in a ring.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable

from mpi4py import MPI

from scripts.benchmarks.timing import Contestant

ROUND_TRIP = "raw socket, round trip"


def duplex_name(nbytes: int) -> str:
    """Of the contestant that moves that many bytes each way."""
    return f"raw socket, {nbytes / 2**20:.3g} MiB each way"


class RawLink:
    """The connection. Making one is collective."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        hosts = comm.allgather(MPI.Get_processor_name())
        first = [hosts.index(host) for host in dict.fromkeys(hosts)]
        if len(first) != 2:
            raise ValueError(f"a raw link joins two hosts, but the ranks run on {len(first)}")
        self._socket: socket.socket | None = None
        server, client = first
        if comm.rank == server:
            with socket.create_server((address(), 0)) as listener:
                comm.bcast(listener.getsockname(), root=server)
                self._socket, _ = listener.accept()
        else:
            where = comm.bcast(None, root=server)
            if comm.rank == client:
                self._socket = socket.create_connection(where[:2])
        self._leads = comm.rank == server
        if self._socket is not None:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def duplex(self, nbytes: int) -> Contestant:
        """`nbytes` each way, both at once."""
        return Contestant(duplex_name(nbytes), self._on_link(lambda link: _duplex(link, nbytes)))

    def round_trip(self) -> Contestant:
        """One byte there and back."""
        return Contestant(ROUND_TRIP, self._on_link(lambda link: _ping(link, leads=self._leads)), batch=10)

    def close(self) -> None:
        """End the connection."""
        if self._socket is not None:
            self._socket.close()

    def _on_link(self, work: Callable[[socket.socket], None]) -> Callable[[], None]:
        link = self._socket
        return (lambda: None) if link is None else (lambda: work(link))


def address() -> str:
    """This host's address on the link."""
    import psutil

    interface = os.environ["BENCH_INTERFACE"]
    found = psutil.net_if_addrs()[interface]
    return next(entry.address for entry in found if entry.family == socket.AF_INET)


def _duplex(link: socket.socket, nbytes: int) -> None:
    sender = threading.Thread(target=link.sendall, args=(memoryview(bytes(nbytes)),))
    sender.start()
    _receive(link, nbytes)
    sender.join()


def _ping(link: socket.socket, *, leads: bool) -> None:
    if leads:
        link.sendall(b"x")
        _receive(link, 1)
    else:
        _receive(link, 1)
        link.sendall(b"x")


def _receive(link: socket.socket, nbytes: int) -> None:
    room = memoryview(bytearray(min(nbytes, 1 << 20)))
    left = nbytes
    while left:
        got = link.recv_into(room[: min(left, len(room))])
        if not got:
            raise ConnectionError("the other host closed the link")
        left -= got
