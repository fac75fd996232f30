"""What every rank runs: one subcommand's `measure`; rank 0 writes the result where the parent looks for it.

Started by `launch` as `mpirun ... python -m scripts.benchmarks.ranks gradients '{"sets": ...}' result.json`.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path

import torch


def main(benchmark: str, options: str, target: str) -> None:
    """Run one subcommand on this rank."""
    torch.set_num_threads(1)
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    start = time.perf_counter()
    results = importlib.import_module(f"scripts.benchmarks.{benchmark}").measure(comm, json.loads(options))
    if comm.rank == 0:
        report = {
            "results": results,
            "took_s": round(time.perf_counter() - start, 1),
            "mpi": MPI.Get_library_version().split(",")[0].strip(),
            "torch": torch.__version__,
        }
        Path(target).write_text(json.dumps(report))
    comm.Free()


if __name__ == "__main__":
    main(*sys.argv[1:])
