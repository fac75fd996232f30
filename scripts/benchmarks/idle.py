"""`idle`: the share of a core that a runtime with nothing to do takes.

Shows the bar "idle runtime". Some tensors are reduced first, so that it is idle and not new.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from mpi4py import MPI

import fusion.torch as hvd
from scripts.benchmarks import ours


def measure(comm: MPI.Intracomm, options: dict[str, Any]) -> list[dict[str, Any]]:
    """CPU time of each rank's process over `seconds` of sleep, and the cycles meanwhile. On every rank."""
    hvd.init()
    contestant = ours.dynamic([torch.ones(256) for _ in range(500)], "idle")
    for _ in range(3):
        contestant.run()
    time.sleep(1.0)  # The pace slows down over the first second.
    cycles, used, start = hvd.stats().cycles, time.process_time(), time.perf_counter()
    time.sleep(options["seconds"])
    took = time.perf_counter() - start
    mine = {
        "rank": comm.rank,
        "cpu_percent": 100 * (time.process_time() - used) / took,
        "cycles_per_s": (hvd.stats().cycles - cycles) / took,
    }
    hvd.shutdown()
    return [{"work": f"idle for {took:.1f} s", "ranks": comm.size, "idle": comm.gather(mine)}]
