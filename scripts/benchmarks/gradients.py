"""`gradients`: whole sets of gradients inside one node, ours in both forms beside the peers.

Shows the bars "ResNet-50 gradient set", "1000 x 256 floats" and "one 64 MiB tensor".
"""

from __future__ import annotations

from typing import Any

import torch
from mpi4py import MPI

import fusion.torch as hvd
from scripts.benchmarks import ours, peers
from scripts.benchmarks.shapes import SETS, Shape, describe, total_bytes
from scripts.benchmarks.timing import Contestant, Series, chosen, compare


def measure(comm: MPI.Intracomm, options: dict[str, Any]) -> list[dict[str, Any]]:
    """All sets of `options`, one after the other. On every rank."""
    hvd.init()
    peers.start_gloo(comm)
    results = []
    for name in options["sets"]:
        contestants = chosen(field(comm, name, SETS[name]()), options["only"])
        series = compare(comm, contestants, rounds=options["rounds"], turn_s=options["turn_s"])
        results.append(result(name, comm.size, series))
    peers.stop_gloo()
    hvd.shutdown()
    return results


def field(comm: MPI.Intracomm, name: str, shapes: list[Shape], *, copies: bool = True) -> list[Contestant]:
    """Everyone who can reduce a set, each checked once.

    Args:
        copies: with plain copies of the set, as a limit.
    """
    tensors = [torch.zeros(shape) for shape in shapes]
    in_place, arena_tensors = ours.static(shapes, f"static.{name}")
    taking_part = [
        ours.dynamic(tensors, f"dynamic.{name}"),
        peers.gloo_buckets(tensors),
        peers.gloo_each(tensors),
        peers.mpi_each(comm, tensors),
        peers.mpi_fused(comm, tensors),
    ]
    if peers.has_horovod():
        taking_part += peers.horovod(tensors, f"horovod.{name}")
    for contestant in taking_part:
        check(comm, contestant, tensors)
    check(comm, in_place, arena_tensors)
    limits = peers.memcpy(comm, total_bytes(shapes)) if copies else []
    return [in_place, *taking_part, *limits]


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
