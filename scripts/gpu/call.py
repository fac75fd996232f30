"""What the runtime costs the host beside one call of NCCL, for a plan that is kept. Prints JSON.

One rank: NCCL then has nothing to send, and the host's part shows. Bar: 20 us over
the plain call for one tensor.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import torch
from mpi4py import MPI

import fusion.torch as hvd
from coordinator.executor import Entry
from coordinator.handle import Bell, Handle
from coordinator.messages import OpKind, Part, ReduceOp, Request, Response
from fusion import runtime
from scripts.benchmarks.shapes import SETS
from scripts.gpu.timing import on_host


def main() -> None:
    """Time the executor alone, and the whole way from the call to the result."""
    torch.cuda.set_device(0)
    hvd.init(gpu="nccl", comm=MPI.COMM_WORLD)
    warm = torch.ones(16, device="cuda")
    hvd.allreduce_(warm, name="warm")
    devices = runtime.current().world.devices
    executor: Any = devices._cuda
    comm, device = executor._comm, executor._device
    tensor = torch.ones(1 << 20, device="cuda")
    result: dict[str, Any] = {}
    device._thread = 0  # Measured from this thread; the cycle thread is idle.
    device.use()
    address = tensor.data_ptr()
    plain = on_host(
        lambda: comm.all_reduce(address, address, tensor.numel(), "float32", ReduceOp.SUM), device.synchronize
    )
    result["nccl_call_us"] = round(plain, 1)
    for name in ("one", "resnet50", "tiny1000"):
        shapes = [tuple(tensor.shape)] if name == "one" else SETS[name]()
        ours = executed(executor, device, devices, shapes)
        result[f"executor_{name}_us"] = round(ours, 1)
    result["bar one tensor <= 20 us over nccl"] = result["executor_one_us"] - plain <= 20.0
    device._thread = 0
    for name in ("one64b", "tiny1000", "resnet50"):
        result[f"submit_to_result_{name}_us"] = round(whole(SETS[name]()), 1)
    print(json.dumps(result), flush=True)
    hvd.shutdown()


def executed(executor: Any, device: Any, devices: Any, shapes: list[tuple[int, ...]]) -> float:
    """Host microseconds to give a response to the device, marks made before."""
    tensors = [torch.ones(shape, device="cuda") for shape in shapes]
    requests = [
        Request(str(n), OpKind.ALLREDUCE, ("float32",), (tuple(t.shape),), device="cuda")
        for n, t in enumerate(tensors)
    ]
    response = Response(OpKind.ALLREDUCE, "float32", tuple(Part(request, 0) for request in requests))
    entries = [
        Entry(request, (t,), (t,), Handle(request.name, Bell()), 0.0, ready=devices.mark((t,), "t"))
        for request, t in zip(requests, tensors, strict=True)
    ]
    return on_host(lambda: executor.execute(response, entries), device.synchronize)


def whole(shapes: list[tuple[int, ...]], repeats: int = 50) -> float:
    """Median microseconds from the first submission until the device is done."""
    tensors = [torch.ones(shape, device="cuda") for shape in shapes]
    times = []
    for _ in range(repeats + 10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        handles = [hvd.allreduce_async_(t, name=f"w{len(shapes)}.{n}") for n, t in enumerate(tensors)]
        for handle in handles:
            handle.result()
        torch.cuda.current_stream().synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times[10:])


if __name__ == "__main__":
    main()
