"""`latency`: one small tensor from submission to result, back to back and after a pause; and over sizes.

Shows the bar "one 64 B all-reduce". The settings are the defaults.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from mpi4py import MPI

import fusion.torch as hvd
from scripts.benchmarks import ours, peers
from scripts.benchmarks.gradients import check
from scripts.benchmarks.timing import Contestant, chosen, compare

PAUSE_S = 0.02


def measure(comm: MPI.Intracomm, options: dict[str, Any]) -> list[dict[str, Any]]:
    """The smallest size with and without a pause, then the other sizes. On every rank."""
    hvd.init()
    peers.start_gloo(comm)
    results = []
    for nbytes in options["sizes"]:
        contestants = chosen(_field(comm, nbytes), options["only"])
        series = compare(comm, contestants, rounds=options["rounds"], turn_s=options["turn_s"])
        results.append(_result(nbytes, comm.size, "back to back", series))
        if nbytes == min(options["sizes"]):
            paused = [replace(contestant, batch=1, run=_paused(contestant)) for contestant in contestants]
            series = compare(comm, paused, rounds=options["rounds"], turn_s=20 * PAUSE_S)
            for found in series.values():
                found.calls = [max(0.0, call - PAUSE_S) for call in found.calls]
                found.rounds = [max(0.0, call - PAUSE_S) for call in found.rounds]
            results.append(_result(nbytes, comm.size, f"after {1e3 * PAUSE_S:.0f} ms of quiet", series))
    peers.stop_gloo()
    hvd.shutdown()
    return results


def _paused(contestant: Contestant) -> Any:
    """The same after a pause that lasts to the microsecond, so that it can be subtracted."""

    def run() -> None:
        end = time.perf_counter() + PAUSE_S
        time.sleep(0.9 * PAUSE_S)
        while time.perf_counter() < end:
            pass
        contestant.run()

    return run


def _field(comm: MPI.Intracomm, nbytes: int) -> list[Contestant]:
    tensor = torch.zeros(nbytes // 4)
    batch = 10 if nbytes < 2**16 else 1
    in_place, arena_tensors = ours.static([tuple(tensor.shape)], f"static.{nbytes}")
    taking_part = [
        ours.dynamic([tensor], f"dynamic.{nbytes}"),
        peers.gloo_each([tensor]),
        peers.mpi_each(comm, [tensor]),
    ]
    if peers.has_horovod():
        taking_part += [make() for make in peers.horovod([tensor], f"horovod.{nbytes}").values()]
    for contestant in taking_part:
        check(comm, contestant, [tensor])
    check(comm, in_place, arena_tensors)
    return [replace(contestant, batch=batch) for contestant in [in_place, *taking_part]]


def _result(nbytes: int, ranks: int, how: str, series: dict[str, Any]) -> dict[str, Any]:
    return {
        "work": f"one tensor of {nbytes:,} B, {how}",
        "nbytes": nbytes,
        "how": how,
        "ranks": ranks,
        "series": {contestant: found.as_dict() for contestant, found in series.items()},
    }
