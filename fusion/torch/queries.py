"""What Horovod scripts ask before they choose: which libraries this runtime uses, and what runs.

The functions ending in `_built` need no `init`, and none of them starts MPI.
"""

from __future__ import annotations

import importlib.util

from fusion import runtime


def mpi_built() -> bool:
    """Whether MPI can be used: mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


def mpi_enabled() -> bool:
    """Whether MPI moves the data: always, where it can be used."""
    return mpi_built()


def mpi_threads_supported() -> bool:
    """Whether the program may use MPI beside the runtime: it was started with MPI_THREAD_MULTIPLE.

    Raises:
        NotInitializedError: `init` has not been called.
    """
    runtime.current()
    return runtime.mpi_threads_supported()


def is_homogeneous() -> bool:
    """Whether every node has the same number of ranks.

    Raises:
        NotInitializedError: `init` has not been called.
    """
    return len({len(ranks) for ranks in runtime.current().topology.nodes}) == 1


def gloo_built() -> bool:
    """Whether Gloo can be used: it is not."""
    return False


def gloo_enabled() -> bool:
    """Whether Gloo moves the data: it does not."""
    return False


def nccl_built() -> int:
    """The version of NCCL that moves data between GPUs, 0 for none: tensors on GPUs are not taken yet."""
    return 0


def cuda_built() -> bool:
    """Whether tensors on CUDA GPUs are taken: not yet."""
    return False


def rocm_built() -> bool:
    """Whether tensors on ROCm GPUs are taken: they are not."""
    return False


def ddl_built() -> bool:
    """Whether IBM's DDL can be used: it is not."""
    return False


def ccl_built() -> bool:
    """Whether oneCCL can be used: it is not."""
    return False
