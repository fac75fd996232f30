"""`gradients`: whole sets of gradients inside one node, ours in both forms beside the peers.

Shows the bars "ResNet-50 gradient set", "1000 x 256 floats" and "one 64 MiB tensor".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from mpi4py import MPI

import fusion.torch as hvd
from fusion.dtypes import to_torch
from scripts.benchmarks import ours, peers
from scripts.benchmarks.shapes import SETS, describe, dtype_of, total_bytes
from scripts.benchmarks.timing import Contestant, Series, compare, is_chosen


def measure(comm: MPI.Intracomm, options: dict[str, Any]) -> list[dict[str, Any]]:
    """All sets of `options`, one after the other. On every rank."""
    hvd.init()
    peers.start_gloo(comm)
    results = []
    for name in options["sets"]:
        contestants = field(comm, name, options["only"])
        series = compare(comm, contestants, rounds=options["rounds"], turn_s=options["turn_s"])
        results.append(result(name, comm.size, series))
    peers.stop_gloo()
    hvd.shutdown()
    return results


def field(comm: MPI.Intracomm, name: str, only: Sequence[str], *, copies: bool = True) -> list[Contestant]:
    """Who can reduce a set, each checked once.

    Args:
        only: those whose names contain any of these words; all if it is empty. Others take no memory.
        copies: with plain copies of the set, as a limit.
    """
    shapes, dtype = SETS[name](), to_torch(dtype_of(name))
    tensors = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    rivals: dict[str, Callable[[], Contestant]] = {
        ours.DYNAMIC: partial(ours.dynamic, tensors, f"dynamic.{name}"),
        peers.GLOO_BUCKETS: partial(peers.gloo_buckets, tensors),
        peers.GLOO_EACH: partial(peers.gloo_each, tensors),
    }
    if peers.mpi_knows(dtype):
        rivals[peers.MPI_EACH] = partial(peers.mpi_each, comm, tensors)
        rivals[peers.MPI_FUSED] = partial(peers.mpi_fused, comm, tensors)
    if peers.has_horovod():
        rivals |= peers.horovod(tensors, f"horovod.{name}")
    taking_part = [make() for rival, make in rivals.items() if is_chosen(rival, only)]
    for contestant in taking_part:
        check(comm, contestant, tensors)
    if is_chosen(ours.STATIC, only):
        in_place, arena_tensors = ours.static(shapes, f"static.{name}", dtype_of(name))
        check(comm, in_place, arena_tensors)
        taking_part.insert(0, in_place)
    if copies and any(is_chosen(limit, only) for limit in (peers.MEMCPY, peers.MEMCPY_ALONE)):
        taking_part += peers.memcpy(comm, total_bytes(shapes, dtype_of(name)))
    return taking_part


def check(comm: MPI.Intracomm, contestant: Contestant, tensors: list[torch.Tensor]) -> None:
    """Run once on known values, and leave zeros: repeated sums of zeros stay finite.

    Raises:
        AssertionError: the sum was wrong, so its time would mean nothing.
    """
    for tensor in tensors:
        tensor.fill_(comm.rank + 1)
    contestant.begin()
    contestant.run()
    contestant.end()
    expected = comm.size * (comm.size + 1) / 2
    wrong = [index for index, tensor in enumerate(tensors) if not bool((tensor == expected).all())]
    if wrong:
        raise AssertionError(f"{contestant.name}: wrong sums in tensors {wrong[:10]}")
    comm.Barrier()
    for tensor in tensors:
        tensor.zero_()
    comm.Barrier()


def result(name: str, ranks: int, series: dict[str, Series]) -> dict[str, Any]:
    """One entry of the report."""
    return {
        "work": describe(name),
        "set": name,
        "ranks": ranks,
        "series": {contestant: found.as_dict() for contestant, found in series.items()},
    }
