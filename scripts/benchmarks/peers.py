"""What we are compared with, each used the way its own users do.

All work on the same list of tensors, in place. gloo's 25 MB buckets are what
DistributedDataParallel does: flatten, all-reduce while the next bucket is
flattened, copy back.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from scripts.benchmarks.raw_socket import address
from scripts.benchmarks.timing import Contestant

GLOO_BUCKETS = "gloo, 25 MB buckets"
GLOO_EACH = "gloo, per tensor"
MPI_EACH = "MPI, per tensor"
MPI_FUSED = "MPI, fused"
MEMCPY = "memcpy, all ranks"
MEMCPY_ALONE = "memcpy, one rank"
HOROVOD_FUSED = "Horovod, fusion 64 MiB"
HOROVOD_EACH = "Horovod, fusion off"

BUCKET_BYTES = 25 * 2**20


def start_gloo(comm: MPI.Intracomm) -> None:
    """Make torch.distributed's default group of the ranks of `comm`. Collective."""
    store: Any
    if _one_host(comm):
        folder = comm.bcast(tempfile.mkdtemp(prefix="bench-gloo-") if comm.rank == 0 else None)
        store = dist.FileStore(str(Path(folder) / "store"), comm.size)
    else:
        host, port = comm.bcast(_free_address() if comm.rank == 0 else None)
        store = dist.TCPStore(host, port, comm.size, is_master=comm.rank == 0)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)


def stop_gloo() -> None:
    """Take the default group down."""
    dist.destroy_process_group()


def gloo_buckets(tensors: Sequence[torch.Tensor]) -> Contestant:
    """Flattened buckets of 25 MB, last gradient first."""
    buckets = _buckets(list(reversed(tensors)))

    def run() -> None:
        flats = []
        works = []
        for bucket in buckets:
            flat = _flatten_dense_tensors(bucket)
            flats.append(flat)
            works.append(dist.all_reduce(flat, async_op=True))
        for bucket, flat, work in zip(buckets, flats, works, strict=True):
            work.wait()
            torch._foreach_copy_(bucket, _unflatten_dense_tensors(flat, bucket))

    return Contestant(GLOO_BUCKETS, run)


def gloo_each(tensors: Sequence[torch.Tensor]) -> Contestant:
    """One asynchronous all-reduce a tensor, then wait for all."""

    def run() -> None:
        works = [dist.all_reduce(tensor, async_op=True) for tensor in reversed(tensors)]
        for work in works:
            work.wait()

    return Contestant(GLOO_EACH, run)


def mpi_knows(dtype: torch.dtype) -> bool:
    """Whether MPI can sum it: there is no MPI datatype for 16-bit floats."""
    return dtype.itemsize > 2 or not dtype.is_floating_point


def mpi_each(comm: MPI.Intracomm, tensors: Sequence[torch.Tensor]) -> Contestant:
    """One blocking MPI_Allreduce a tensor."""
    arrays = [tensor.numpy() for tensor in reversed(tensors)]

    def run() -> None:
        for array in arrays:
            comm.Allreduce(MPI.IN_PLACE, array)

    return Contestant(MPI_EACH, run)


def mpi_fused(comm: MPI.Intracomm, tensors: Sequence[torch.Tensor]) -> Contestant:
    """Copy all into one buffer, one MPI_Allreduce, copy back."""
    flat = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=tensors[0].dtype)
    views = _views(flat, tensors)
    array: np.ndarray[Any, Any] = flat.numpy()
    listed = list(tensors)

    def run() -> None:
        torch._foreach_copy_(views, listed)
        comm.Allreduce(MPI.IN_PLACE, array)
        torch._foreach_copy_(listed, views)

    return Contestant(MPI_FUSED, run)


def memcpy(comm: MPI.Intracomm, nbytes: int) -> list[Contestant]:
    """One copy of that many bytes: on all ranks at once, and on rank 0 while the others wait."""
    source = torch.zeros(nbytes, dtype=torch.uint8)
    target = torch.ones(nbytes, dtype=torch.uint8)

    def run() -> None:
        target.copy_(source)

    alone = run if comm.rank == 0 else lambda: None
    return [Contestant(MEMCPY, run), Contestant(MEMCPY_ALONE, alone)]


def has_horovod() -> bool:
    """Whether Horovod's PyTorch face can be imported."""
    return importlib.util.find_spec("horovod") is not None


def horovod(tensors: Sequence[torch.Tensor], scope: str) -> dict[str, Callable[[], Contestant]]:
    """Horovod at its best settings: cycle time 0.1 ms, with fusion and without; it runs in its turns only."""
    horovod_torch = importlib.import_module("horovod.torch")

    named = [(tensor, f"{scope}.{index}") for index, tensor in enumerate(tensors)]
    named.reverse()

    def run() -> None:
        handles = [
            horovod_torch.allreduce_async_(tensor, name=name, op=horovod_torch.Sum) for tensor, name in named
        ]
        for handle in handles:
            horovod_torch.synchronize(handle)

    def start(threshold: int) -> None:
        os.environ["HOROVOD_CYCLE_TIME"] = "0.1"
        os.environ["HOROVOD_FUSION_THRESHOLD"] = str(threshold)
        horovod_torch.init()

    def made(name: str, threshold: int) -> Contestant:
        return Contestant(name, run, partial(start, threshold), horovod_torch.shutdown)

    return {
        HOROVOD_FUSED: partial(made, HOROVOD_FUSED, 64 * 2**20),
        HOROVOD_EACH: partial(made, HOROVOD_EACH, 0),
    }


def _buckets(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    buckets: list[list[torch.Tensor]] = []
    filled = BUCKET_BYTES
    for tensor in tensors:
        if filled >= BUCKET_BYTES:
            buckets.append([])
            filled = 0
        buckets[-1].append(tensor)
        filled += tensor.nbytes
    return buckets


def _views(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _one_host(comm: MPI.Intracomm) -> bool:
    return len(set(comm.allgather(MPI.Get_processor_name()))) == 1


def _free_address() -> tuple[str, int]:
    """An address of this host that the other one can reach, and a port."""
    host = address()
    with socket.socket() as probe:
        probe.bind((host, 0))
        return host, probe.getsockname()[1]
