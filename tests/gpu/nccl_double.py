"""The double of CuPy's NCCL, part of `doubles.py`: its operations go by MPI, on the streams of a `Gpu`."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from mpi4py import MPI

from tests.gpu.arithmetic import elements, memory

if TYPE_CHECKING:
    from tests.gpu.doubles import Gpu

DEFAULT = 0
"""The address of the default stream."""


class Nccl:
    """`cupy.cuda.nccl`, by MPI. An id is the rank in MPI_COMM_WORLD that made it, and a number."""

    NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_INT64 = 0, 1, 2, 4
    NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_BFLOAT16 = 6, 7, 8, 9
    NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN = 0, 1, 2, 3

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.version = 23203
        self.group: list[Callable[[], list[MPI.Request]]] | None = None
        self.group_stream = DEFAULT
        self._ids = itertools.count(1)
        self.alive: list[Communicator] = []

    def get_version(self) -> int:
        self._gpu.note("cupy.cuda.nccl.get_version")
        return self.version

    def get_unique_id(self) -> bytes:
        self._gpu.note("cupy.cuda.nccl.get_unique_id")
        return np.array([MPI.COMM_WORLD.rank, next(self._ids)], np.int64).tobytes()

    def NcclCommunicator(self, ndev: int, unique: bytes, rank: int) -> Communicator:  # noqa: N802
        self._gpu.note("cupy.cuda.nccl.NcclCommunicator", ndev, unique, rank)
        if self._gpu.refusal is not None:
            raise self._gpu.refusal
        made = Communicator(self._gpu, ndev, unique, rank)
        self.alive.append(made)
        return made

    def groupStart(self) -> None:  # noqa: N802
        self._gpu.note("cupy.cuda.nccl.groupStart")
        self.group = []

    def groupEnd(self) -> None:  # noqa: N802
        self._gpu.note("cupy.cuda.nccl.groupEnd")
        group, self.group = self.group, None
        if group:
            self._gpu.give(
                self.group_stream, lambda: MPI.Request.Waitall([r for post in group for r in post()])
            )


_TYPES = {
    0: torch.int8,
    1: torch.uint8,
    2: torch.int32,
    4: torch.int64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    9: torch.bfloat16,
}
_COMBINE: dict[int, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    0: torch.add,
    1: torch.mul,
    2: lambda a, b: torch.fmax(a, b) if a.dtype.is_floating_point else torch.maximum(a, b),
    3: lambda a, b: torch.fmin(a, b) if a.dtype.is_floating_point else torch.minimum(a, b),
}
"""As NCCL does it: a minimum or maximum drops NaN."""

_PATH = "cupy.cuda.nccl.NcclCommunicator."


class Communicator:
    def __init__(self, gpu: Gpu, ndev: int, unique: bytes, rank: int) -> None:
        self._gpu = gpu
        self.state = "alive"
        maker, number = np.frombuffer(unique, np.int64).tolist()
        world, tag = MPI.COMM_WORLD, 7000 + number
        ranks = np.zeros(ndev, np.int64)
        if rank == 0:
            ranks[0] = world.rank
            for _ in range(1, ndev):
                status = MPI.Status()
                place = np.zeros(1, np.int64)
                world.Recv(place, source=MPI.ANY_SOURCE, tag=tag, status=status)
                ranks[place[0]] = status.source
            for other in ranks[1:]:
                world.Send(ranks, dest=int(other), tag=tag)
        else:
            world.Send(np.array([rank], np.int64), dest=maker, tag=tag)
            world.Recv(ranks, source=maker, tag=tag)
        self._comm = world.Create_group(world.group.Incl(ranks.tolist()), tag=tag)
        assert self._comm.rank == rank

    def allReduce(self, *args: int) -> None:  # noqa: N802
        source, target, count, dtype, op, stream = self._note("allReduce", args)
        self._give(stream, lambda: _put(target, self._reduced(source, count, dtype, op)))

    def reduceScatter(self, *args: int) -> None:  # noqa: N802
        source, target, count, dtype, op, stream = self._note("reduceScatter", args)
        rank, size = self._comm.rank, self._comm.size

        def run() -> None:
            total = self._reduced(source, count * size, dtype, op)
            _put(target, total[rank * count : (rank + 1) * count])

        self._give(stream, run)

    def reduce(self, *args: int) -> None:
        source, target, count, dtype, op, root, stream = self._note("reduce", args)

        def run() -> None:
            total = self._reduced(source, count, dtype, op)
            if self._comm.rank == root:
                _put(target, total)

        self._give(stream, run)

    def allGather(self, *args: int) -> None:  # noqa: N802
        source, target, count, dtype, stream = self._note("allGather", args)
        self._give(stream, lambda: _put(target, torch.cat(self._all(source, count, dtype))))

    def broadcast(self, *args: int) -> None:
        source, target, count, dtype, root, stream = self._note("broadcast", args)
        nbytes = count * _TYPES[dtype].itemsize

        def run() -> None:
            if self._comm.rank == root:
                ctypes.memmove(target, source, nbytes)
            self._comm.Bcast(memory(target, nbytes).numpy(), root=root)

        self._give(stream, run)

    def send(self, *args: int) -> None:
        source, count, dtype, peer, stream = self._note("send", args)
        nbytes = count * _TYPES[dtype].itemsize
        self._post(stream, lambda: [self._comm.Isend(memory(source, nbytes).numpy(), dest=peer)])

    def recv(self, *args: int) -> None:
        target, count, dtype, peer, stream = self._note("recv", args)
        nbytes = count * _TYPES[dtype].itemsize
        self._post(stream, lambda: [self._comm.Irecv(memory(target, nbytes).numpy(), source=peer)])

    def check_async_error(self) -> None:
        self._gpu.note(_PATH + "check_async_error")
        if self._gpu.failure is not None:
            raise self._gpu.failure

    def destroy(self) -> None:
        self._gpu.note(_PATH + "destroy")
        self._end("destroyed")

    def abort(self) -> None:
        self._gpu.note(_PATH + "abort")
        self._end("aborted")

    def _end(self, state: str) -> None:
        assert self.state == "alive", f"a communicator that was {self.state} is {state}"
        self.state = state

    def _note(self, name: str, args: tuple[int, ...]) -> tuple[int, ...]:
        assert self.state == "alive", f"{name} on a communicator that was {self.state}"
        self._gpu.note(_PATH + name, *args)
        return args

    def _give(self, stream: int, step: Callable[[], object]) -> None:
        nccl = self._gpu.modules.nccl
        if nccl.group is not None:
            nccl.group_stream = stream
            nccl.group.append(lambda: step() or [])
        else:
            self._gpu.give(stream, step)

    def _post(self, stream: int, post: Callable[[], list[MPI.Request]]) -> None:
        nccl = self._gpu.modules.nccl
        assert nccl.group is not None, "a send or receive outside of a group may wait for ever"
        nccl.group_stream = stream
        nccl.group.append(post)

    def _all(self, source: int, count: int, dtype: int) -> list[torch.Tensor]:
        mine = elements(source, count, _TYPES[dtype]).view(torch.uint8).numpy()
        everyones = np.empty((self._comm.size, len(mine)), np.uint8)
        self._comm.Allgather(mine, everyones)
        return [torch.from_numpy(row).view(_TYPES[dtype]) for row in everyones]

    def _reduced(self, source: int, count: int, dtype: int, op: int) -> torch.Tensor:
        total, *others = self._all(source, count, dtype)
        for other in others:
            total = _COMBINE[op](total, other)
        return total


def _put(target: int, values: torch.Tensor) -> None:
    elements(target, len(values), values.dtype).copy_(values)
