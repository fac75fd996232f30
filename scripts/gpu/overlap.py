"""Whether reductions run beside the backward pass. Prints JSON.

One rank, so NCCL only copies on the device; what shows is whether the side stream
runs while the backward pass does, and what the runtime adds to a step.
"""

from __future__ import annotations

import json
import statistics
import time

import torch
from mpi4py import MPI

import fusion.torch as hvd

WIDTH, LAYERS, BATCH = 4096, 12, 2048


def main() -> None:
    """Time steps without the runtime, and with it in both kinds of buckets."""
    torch.cuda.set_device(0)
    hvd.init(gpu="nccl", comm=MPI.COMM_WORLD)
    result: dict[str, float] = {"plain_ms": round(step_ms(None), 3)}
    for buckets in ("dynamic", "static"):
        result[f"{buckets}_ms"] = round(step_ms(buckets), 3)
        result[f"{buckets}_over_plain"] = round(result[f"{buckets}_ms"] / result["plain_ms"], 3)
    result["reduction_alone_ms"] = round(reduction_ms(), 3)
    print(json.dumps(result), flush=True)
    hvd.shutdown()


def model() -> torch.nn.Module:
    """Layers of which each has a gradient of 64 MiB."""
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    return torch.nn.Sequential(*layers).cuda()


def step_ms(buckets: str | None, repeats: int = 12) -> float:
    """Median milliseconds of a step."""
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), lr=1e-9)
    if buckets is not None:
        optimizer = hvd.DistributedOptimizer(optimizer, made.named_parameters(), buckets=buckets)
    inputs = torch.randn(BATCH, WIDTH, device="cuda")
    times = []
    for _ in range(repeats + 4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer.zero_grad()
        made(inputs).sum().backward()
        optimizer.step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[4:])


def reduction_ms(repeats: int = 12) -> float:
    """Median milliseconds of the same gradients, reduced with nothing beside."""
    gradients = [torch.randn(WIDTH, WIDTH, device="cuda") for _ in range(LAYERS)]
    times = []
    for _ in range(repeats + 4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        handles = [hvd.allreduce_async_(g, name=f"alone{n}") for n, g in enumerate(gradients)]
        for handle in handles:
            handle.result()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[4:])


if __name__ == "__main__":
    main()
