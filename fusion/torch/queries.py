"""What Horovod scripts ask before they choose: which libraries this runtime uses, and what runs.

The functions ending in `_built` need no `init`, and none of them starts MPI.
"""

from __future__ import annotations

import importlib.util

import torch

from fusion import runtime
from fusion.cuda.present import nccl_version


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
    """The version of NCCL that moves data between GPUs, as NCCL counts (22803 is 2.28.3); 0 for none."""
    return nccl_version()


def cuda_built() -> bool:
    """Whether tensors on CUDA GPUs can be taken: torch was built for them."""
    return torch.backends.cuda.is_built()


def rocm_built() -> bool:
    """Whether tensors on ROCm GPUs are taken: they are not."""
    return False


def ddl_built() -> bool:
    """Whether IBM's DDL can be used: it is not."""
    return False


def ccl_built() -> bool:
    """Whether oneCCL can be used: it is not."""
    return False
