"""The PyTorch face: `import fusion.torch as hvd`.

Functions have the names, parameters and meaning that Horovod documents. All of
them need `init()` first; collective ones are called by every rank.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from coordinator.errors import (
    ConfigError,
    DuplicateNameError,
    FusionError,
    MismatchError,
    NotInitializedError,
    RankLeftError,
    RuntimeBrokenError,
    ShutdownError,
    StallError,
)
from coordinator.handle import Handle
from coordinator.stats import Stats
from fusion import runtime
from fusion.memory import MemoryReport
from fusion.runtime import is_initialized, shutdown
from fusion.torch import elastic
from fusion.torch.compression import Compression
from fusion.torch.functions import broadcast_optimizer_state, broadcast_parameters
from fusion.torch.objects import allgather_object, broadcast_object
from fusion.torch.ops import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    poll,
    reducescatter,
    reducescatter_async,
    synchronize,
)
from fusion.torch.optimizer import DistributedOptimizer
from fusion.torch.process_sets import (
    ProcessSet,
    add_process_set,
    get_process_set_ids_and_ranks,
    global_process_set,
    init_process_sets,
    remove_process_set,
)
from fusion.torch.queries import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from fusion.torch.sparse import sparse_allreduce_async

if TYPE_CHECKING:
    from fusion.torch.sync_batch_norm import SyncBatchNorm

HorovodInternalError = FusionError
"""What Horovod scripts catch."""

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "ConfigError",
    "DistributedOptimizer",
    "DuplicateNameError",
    "FusionError",
    "Handle",
    "HorovodInternalError",
    "Max",
    "Min",
    "MismatchError",
    "NotInitializedError",
    "ProcessSet",
    "Product",
    "RankLeftError",
    "RuntimeBrokenError",
    "ShutdownError",
    "StallError",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "memory_report",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stats",
    "stop_timeline",
    "synchronize",
]


def __getattr__(name: str) -> Any:
    # Its import takes torch.compile's, which doubles the time to start; most jobs need neither.
    if name == "SyncBatchNorm":
        from fusion.torch.sync_batch_norm import SyncBatchNorm

        globals()[name] = SyncBatchNorm
        return SyncBatchNorm
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def init(config: Any = None, process_sets: Any = None, *, comm: Any = None, **overrides: Any) -> None:
    """Start the runtime; see `fusion.runtime.init`. A second call only registers process sets.

    Args:
        config: settings, or `comm` as in Horovod.
        process_sets: list of `ProcessSet`, the same on every rank but for those of
            communicators; they are registered, and sets of the same ranks are registered
            once. "dynamic" is accepted: `add_process_set` works always.
        comm: the ranks that take part, a list or an mpi4py communicator.
        overrides: single settings.

    Raises:
        ValueError: an entry of `process_sets` has the ranks of an earlier one or of all
            ranks; the runtime runs nevertheless.
        FusionError: MPI was started without the threads that are needed.
    """
    runtime.init(config, comm=comm, **overrides)
    given = comm if comm is not None else config
    global_process_set.mpi_comm = given if hasattr(given, "Split") else global_process_set.mpi_comm
    init_process_sets(process_sets)


def rank() -> int:
    """This process's number among all ranks."""
    return runtime.current().topology.rank


def size() -> int:
    """How many ranks there are."""
    return runtime.current().topology.size


def local_rank() -> int:
    """This process's number among the ranks of its node."""
    return runtime.current().topology.local_rank


def local_size() -> int:
    """How many ranks there are on this node."""
    return runtime.current().topology.local_size


def cross_rank() -> int:
    """This node's number among the nodes that have a rank of the same local rank."""
    return runtime.current().topology.cross_rank


def cross_size() -> int:
    """How many nodes have a rank of the same local rank."""
    return runtime.current().topology.cross_size


def stats() -> Stats:
    """What the runtime has done so far on this rank."""
    return runtime.current().stats()


def memory_report() -> MemoryReport:
    """What the runtime's own buffers take on this rank at present, in bytes."""
    return runtime.current().memory_report()


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:  # noqa: ARG001
    """Write a trace of this rank from now on.

    Args:
        file_path: of the trace.
        mark_cycles: accepted; cycles are always marked.
    """
    runtime.current().start_timeline(file_path)


def stop_timeline() -> None:
    """Finish the trace."""
    runtime.current().stop_timeline()
