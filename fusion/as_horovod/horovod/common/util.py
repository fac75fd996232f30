"""Small helpers that scripts and tests import from here."""

import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import fusion.torch


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:  # noqa: ARG001
    """Whether there is a face for this framework."""
    return ext_base_name == "torch"


def check_extension(ext_name: str, *rest: Any) -> None:  # noqa: ARG001
    """Refuse a framework without a face.

    Raises:
        ImportError: it is not `horovod.torch`.
    """
    if ext_name != "horovod.torch":
        raise ImportError(f"{ext_name}: this runtime has a face for PyTorch only")


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether this framework has a face and sees a GPU."""
    return extension_available(ext_base_name, verbose) and torch.cuda.is_available()


def mpi_built(verbose: bool = False) -> bool:  # noqa: ARG001
    """Whether MPI is there."""
    return fusion.torch.mpi_built()


def gloo_built(verbose: bool = False) -> bool:  # noqa: ARG001
    """Whether Gloo is used."""
    return fusion.torch.gloo_built()


def nccl_built(verbose: bool = False) -> bool:  # noqa: ARG001
    """Whether NCCL is there."""
    return bool(fusion.torch.nccl_built())


def ddl_built(verbose: bool = False) -> bool:  # noqa: ARG001
    """Whether IBM's DDL is used."""
    return fusion.torch.ddl_built()


def ccl_built(verbose: bool = False) -> bool:  # noqa: ARG001
    """Whether oneCCL is used."""
    return fusion.torch.ccl_built()


def _cache(function: Callable[..., Any]) -> Callable[..., Any]:
    """Call a function once for each set of arguments."""
    return functools.cache(function)


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Set environment variables for a while. Those given as None are left alone."""
    given = {name: value for name, value in variables.items() if value is not None}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number of ranks is a power of two."""
    return num_rank > 0 and num_rank.bit_count() == 1


def split_list(items: Sequence[Any], parts: int) -> list[Sequence[Any]]:
    """Cut a sequence into parts whose lengths differ by one at most, longer ones first."""
    length, longer = divmod(len(items), parts)
    starts = [part * length + min(part, longer) for part in range(parts + 1)]
    return [items[start:stop] for start, stop in itertools.pairwise(starts)]


def is_iterable(value: object) -> bool:
    """Whether one can iterate over it."""
    return isinstance(value, Iterable) or hasattr(value, "__getitem__")
