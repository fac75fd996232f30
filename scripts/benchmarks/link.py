"""`link`: sets of gradients over two hosts and a 1 Gbit/s link, beside what a raw socket does on it.

Shows the bars "two namespaced hosts, ResNet-50 set" and "the same link, 1000 x
256 floats". Two hosts exchange S bytes each way for an all-reduce of S bytes, so
the raw socket moves the same S each way, both at once.
"""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

import fusion.torch as hvd
from scripts.benchmarks import peers
from scripts.benchmarks.gradients import field, result
from scripts.benchmarks.raw_socket import RawLink
from scripts.benchmarks.shapes import SETS, dtype_of, total_bytes
from scripts.benchmarks.timing import compare


def measure(comm: MPI.Intracomm, options: dict[str, Any]) -> list[dict[str, Any]]:
    """All sets of `options`, one after the other. On every rank."""
    hvd.init()
    peers.start_gloo(comm)
    raw = RawLink(comm)
    results = []
    for name in options["sets"]:
        contestants = [
            *field(comm, name, options["only"], copies=False),
            raw.duplex(total_bytes(SETS[name](), dtype_of(name))),
            raw.round_trip(),
        ]
        series = compare(comm, contestants, rounds=options["rounds"], turn_s=options["turn_s"])
        results.append(result(name, comm.size, series))
    raw.close()
    peers.stop_gloo()
    hvd.shutdown()
    return results
