"""`between`: one payload between ranks by the ring, by recursive doubling, and by MPI's own all-reduce.

What `fusion.collectives.chooser.SHORT_BYTES` is taken from. No runtime: the algorithms
alone, each on all ranks as if each were a node.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from coordinator.messages import ReduceOp
from coordinator.waiting import Waiter, wake_on_time
from fusion.arithmetic import Arithmetic, Scratch
from fusion.channel import Channel
from fusion.choices import choose_settings
from fusion.collectives.doubling import Doubling
from fusion.collectives.ring import Ring
from fusion.config import Config
from scripts.benchmarks.timing import Contestant, chosen, compare

RING = "ring"
DOUBLING = "recursive doubling"
OWN = "MPI_Iallreduce"


def measure(comm: MPI.Intracomm, options: dict[str, Any]) -> list[dict[str, Any]]:
    """All sizes of `options`, one after the other. On every rank."""
    wake_on_time()
    channel = Channel(comm.Dup(), Waiter(lambda: None))
    segment_bytes = choose_settings(comm, Config()).ring_segment_kb * 1024
    results = []
    for nbytes in options["sizes"]:
        contestants = chosen(_field(channel, comm, nbytes, segment_bytes), options["only"])
        series = compare(comm, contestants, rounds=options["rounds"], turn_s=options["turn_s"])
        results.append(
            {
                "work": f"{nbytes:,} B",
                "nbytes": nbytes,
                "ranks": comm.size,
                "series": {name: found.as_dict() for name, found in series.items()},
            }
        )
    return results


def _field(channel: Channel, comm: MPI.Intracomm, nbytes: int, segment_bytes: int) -> list[Contestant]:
    count = nbytes // 4
    vector, out = torch.zeros(count), np.zeros(count, dtype=np.float32)
    own = np.zeros_like(out)
    arithmetic = Arithmetic(
        ReduceOp.SUM, "float32", comm.size, prescale=1.0, postscale=1.0, scratch=Scratch()
    )
    ways = {RING: Ring(channel, segment_bytes), DOUBLING: Doubling(channel)}
    contestants = [
        Contestant(name, lambda way=way: way.all_reduce(vector, vector, arithmetic))  # type: ignore[misc]
        for name, way in ways.items()
    ]
    return [*contestants, Contestant(OWN, lambda: channel.wait(comm.Iallreduce(own, out)))]
