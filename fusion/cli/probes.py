"""Small programs that `fusion doctor` runs in processes of their own.

`python -m fusion.cli.probes NAME` prints one line of JSON. A library that hangs or
crashes when it is loaded thus costs the doctor one finding, not its life.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any


def mpi() -> dict[str, Any]:
    """The library that mpi4py loads, and the thread level it grants."""
    import mpi4py
    from mpi4py import MPI

    names = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }
    vendor, version = MPI.get_vendor()
    return {
        "mpi4py": mpi4py.__version__,
        "library": f"{vendor} {'.'.join(map(str, version))}",
        "thread_level": names[MPI.Query_thread()],
    }


def launched() -> dict[str, Any]:
    """How many ranks the library sees; 1 when launcher and library are of different MPIs."""
    from mpi4py import MPI

    return {"size": MPI.COMM_WORLD.size, "sum": MPI.COMM_WORLD.allreduce(1)}


def survives() -> dict[str, Any]:
    """Kill rank 1, and see whether rank 0 can shrink the communicator and go on."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    world.Set_errhandler(MPI.ERRORS_RETURN)
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)  # The launcher notices the death meanwhile; it may come later too.
    try:
        world.Barrier()
    except MPI.Exception:
        print(json.dumps({"survivors": world.Shrink().size}), flush=True)
    os._exit(0)  # MPI_Finalize would wait for the dead rank.


def torch() -> dict[str, Any]:
    """torch, and the GPUs and NCCL it was built for."""
    import torch as library

    cuda = library.cuda.is_available()
    return {
        "version": library.__version__,
        "gpus": [library.cuda.get_device_name(i) for i in range(library.cuda.device_count())] if cuda else [],
    }


def cupy() -> dict[str, Any]:
    """CuPy, the GPUs it sees and its NCCL."""
    import cupy as library

    found: dict[str, Any] = {"version": library.__version__, "gpus": 0, "nccl": None, "nvrtc": None}
    try:
        found["gpus"] = library.cuda.runtime.getDeviceCount()
    except library.cuda.runtime.CUDARuntimeError as error:
        found["error"] = str(error)
    try:
        found["nvrtc"] = ".".join(map(str, library.cuda.nvrtc.getVersion()))
    except (ImportError, RuntimeError) as error:
        found["nvrtc_error"] = str(error)
    try:
        from cupy.cuda import nccl

        found["nccl"] = nccl.get_version()
    except (ImportError, AttributeError) as error:
        found["nccl_error"] = str(error)
    return found


PROBES: dict[str, Callable[[], dict[str, Any]]] = {
    "mpi": mpi,
    "launched": launched,
    "survives": survives,
    "torch": torch,
    "cupy": cupy,
}


def main(name: str) -> None:
    """Run one probe; an exception becomes the finding."""
    try:
        found = PROBES[name]()
    except Exception as error:  # noqa: BLE001 - whatever a library raises on loading is the finding
        found = {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
    # One write, so that the lines of two ranks do not mix.
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
