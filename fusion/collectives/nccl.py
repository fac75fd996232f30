"""NCCL communicators, through CuPy: made by agreement, used on the side stream, ended in order.

Cycle thread only, but for the connecting, which NCCL may never come back from
and which therefore has a thread of its own. A process set has at most one
communicator for all its ranks and one for those of its node; both are made when
the first operation needs them, by all ranks at the same point.

An error of NCCL's that is raised here ends the runtime: ranks may no longer be
in step. The executor then aborts the communicators, so that nothing on the
device waits for ever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from coordinator.errors import FusionError
from coordinator.messages import ReduceOp
from coordinator.waiting import Waiter
from fusion.channel import Channel
from fusion.cuda.device import Device

CONNECT_S = 120.0
"""How long all ranks of a communicator may take to find each other."""


class Communicator:
    """Ranks that reduce with NCCL.

    Addresses are of device memory, counts are elements, dtypes are names.

    Attributes:
        rank, size: in the communicator.
    """

    def __init__(self, device: Device, comm: Any, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._device = device
        self._nccl = device.nccl
        self._stream = device.side
        self._comm: Any = comm
        self._types = _types(device.nccl)
        self._ops = {
            ReduceOp.SUM: device.nccl.NCCL_SUM,
            ReduceOp.PRODUCT: device.nccl.NCCL_PROD,
            ReduceOp.MIN: device.nccl.NCCL_MIN,
            ReduceOp.MAX: device.nccl.NCCL_MAX,
        }

    @classmethod
    def connect(cls, device: Device, ranks: Channel, everyone: Channel, waiter: Waiter) -> Communicator:
        """Connect some ranks. Collective over `everyone`, which is all of them or more.

        Args:
            device: of this rank.
            ranks: those that the communicator is for; the first makes its id.
            everyone: agrees that all have succeeded.
            waiter: asks meanwhile whether a rank has failed.

        Raises:
            FusionError: some rank could not connect; alike on all.
        """
        found: list[Any] = []
        errors: list[str] = []
        text = device.nccl.get_unique_id().hex() if ranks.rank == 0 else None
        unique = bytes.fromhex(ranks.broadcast_text(text, root=0))

        def work() -> None:
            try:
                device.use_elsewhere()
                found.append(device.nccl.NcclCommunicator(ranks.size, unique, ranks.rank))
            except Exception as error:  # noqa: BLE001 - told to all ranks below
                errors.append(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=work, name="fusion-nccl-connect", daemon=True)
        deadline = time.monotonic() + CONNECT_S
        thread.start()
        waiter.until(lambda: not thread.is_alive() or time.monotonic() > deadline)
        error = None
        if not found:
            why = errors[0] if errors else f"no answer within {CONNECT_S:g} s"
            error = (
                f"rank {everyone.rank} could not connect GPU {device.index} by NCCL: {why}. NCCL_DEBUG=WARN "
                'says more; gpu="host" does without NCCL'
            )
        try:
            everyone.agree(error)
        except FusionError:
            if found:
                found[0].abort()
            raise
        return cls(device, found[0], ranks.rank, ranks.size)

    def all_reduce(self, source: int, target: int, count: int, dtype: str, op: ReduceOp) -> None:
        """Reduce `count` elements of all ranks; in place if the addresses are equal."""
        self._comm.allReduce(source, target, count, self._types[dtype], self._ops[op], self._stream)

    def reduce_scatter(self, source: int, target: int, count: int, dtype: str, op: ReduceOp) -> None:
        """Give each rank its `count` elements of the reduced `count * size`."""
        self._comm.reduceScatter(source, target, count, self._types[dtype], self._ops[op], self._stream)

    def reduce(self, buffer: int, count: int, dtype: str, op: ReduceOp) -> None:
        """Reduce in place on rank 0; on the others the buffer stays as it is."""
        self._comm.reduce(buffer, buffer, count, self._types[dtype], self._ops[op], 0, self._stream)

    def all_gather(self, source: int, target: int, count: int, dtype: str) -> None:
        """Put the `count` elements of each rank one after the other, on all ranks."""
        self._comm.allGather(source, target, count, self._types[dtype], self._stream)

    def broadcast(self, source: int, target: int, count: int, dtype: str, root: int) -> None:
        """Copy `count` elements of `root` to all ranks."""
        self._comm.broadcast(source, target, count, self._types[dtype], root, self._stream)

    def send(self, source: int, count: int, dtype: str, to: int) -> None:
        """Send to one rank, which receives as many; in a `group`."""
        self._comm.send(source, count, self._types[dtype], to, self._stream)

    def receive(self, target: int, count: int, dtype: str, source: int) -> None:
        """Receive from one rank; in a `group`."""
        self._comm.recv(target, count, self._types[dtype], source, self._stream)

    @contextmanager
    def group(self) -> Iterator[None]:
        """The calls inside run as one operation."""
        self._nccl.groupStart()
        try:
            yield
        finally:
            self._nccl.groupEnd()

    def check(self) -> None:
        """Raise what NCCL has found out since, such as the death of another rank."""
        if self._comm is not None:
            self._comm.check_async_error()

    def destroy(self) -> None:
        """End it. Every rank does so at the same point, with nothing under way."""
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.destroy()

    def abort(self) -> None:
        """End it now, and with it what waits for other ranks on the device."""
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.abort()


def _types(nccl: Any) -> dict[str, int]:
    return {
        "bool": nccl.NCCL_UINT8,
        "uint8": nccl.NCCL_UINT8,
        "int8": nccl.NCCL_INT8,
        "int32": nccl.NCCL_INT32,
        "int64": nccl.NCCL_INT64,
        "float16": nccl.NCCL_FLOAT16,
        "bfloat16": nccl.NCCL_BFLOAT16,
        "float32": nccl.NCCL_FLOAT32,
        "float64": nccl.NCCL_FLOAT64,
    }
