"""What is missing for tensors on GPUs, in words. Called on any thread; starts CUDA on no device."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch


@cache
def missing() -> str | None:
    """Why tensors on GPUs cannot be reduced in this process, and what to do; None if they can.

    NCCL is not asked for here: without it they go through host memory.
    """
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} is built without CUDA: install one that is built with it"
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed: pip install cupy-cuda12x, or that of your CUDA version"
    try:
        import cupy
    except Exception as error:  # noqa: BLE001 - whatever it raises on loading is the reason
        return f"CuPy cannot be loaded ({error}): install the one of your CUDA version"
    if not torch.cuda.is_available():
        return "torch finds no GPU it can use: see `fusion doctor`"
    try:
        cupy.cuda.nvrtc.getVersion()
    except Exception as error:  # noqa: BLE001 - the same
        return f"CuPy finds no NVRTC to compile kernels with ({error}): pip install nvidia-cuda-nvrtc-cu12"
    return None


def nccl_version() -> int:
    """The version of NCCL that CuPy has loaded, as NCCL counts (22803 is 2.28.3); 0 for none."""
    if importlib.util.find_spec("cupy") is None:
        return 0
    try:
        from cupy.cuda import nccl

        return int(nccl.get_version())
    except Exception:  # noqa: BLE001 - CuPy or NCCL cannot be loaded
        return 0
