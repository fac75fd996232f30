"""Compression on the device: held against the compressors for CPUs on random data, and timed. Prints JSON.

Times are for a bucket of 25 MiB, beside a device copy of it and the same on the CPU; `exchange` is the whole
way from the call to the result, with feedback, on one rank.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import torch
from mpi4py import MPI

import fusion.compression as fc
import fusion.torch as hvd
from fusion.cuda.codecs import on_device
from fusion.cuda.compressing import Compressing
from fusion.cuda.device import Device, Marker, load_modules
from scripts.gpu.timing import on_device as median_us

COUNTS = (1, 7, 2048, 2049, 100_003, 1 << 20)
CHECKED = (
    "int8:rounding=nearest",
    "int8:64,rounding=nearest",
    "onebit",
    "onebit:64",
    "topk:0.01",
    "topk:0.5",
)
TIMED = ("int8", "int8:rounding=nearest", "onebit", "topk:0.01", "bf16")
COUNT = 25 * (1 << 18)


def main() -> None:
    """Check, time, print."""
    torch.cuda.set_device(0)
    modules = load_modules()
    device = Device(Marker(modules, 0), modules)
    kernels = Compressing(device)
    result: dict[str, Any] = {"checked": check(device, kernels)}
    result["copy_us"] = round(copy_us(device), 1)
    for spec in TIMED[:-1]:
        result[spec] = coded(device, kernels, spec)
    hvd.init(gpu="nccl", comm=MPI.COMM_WORLD)
    result["exchanged"] = check_exchange()
    for spec in ("none", *TIMED):
        result.setdefault(spec, {})["exchange_us"] = round(exchange_us(spec), 1)
    print(json.dumps(result), flush=True)
    hvd.shutdown()


def check(device: Device, kernels: Compressing) -> str:
    """Hold payloads, and what they are decoded to, against the CPU's: the same bits but for means."""
    cases = 0
    for count in COUNTS:
        for spec in CHECKED:
            for sign in (1, -1):
                _check(device, kernels, spec, count, sign)
                cases += 1
        _check_at_random(device, kernels, count)
    return f"{cases} payloads and sums equal to the CPU's"


def _check(device: Device, kernels: Compressing, spec: str, count: int, sign: int) -> None:
    method: Any = fc.parse(spec)
    coding: Any = on_device(spec, kernels, adds=False)
    info, values = fc.BucketInfo.of([("t", (count,))]), torch.randn(count)
    values[:: max(1, count // 5)] = 0.0
    there, total = values.cuda(), torch.randn(count)
    sum_there = total.cuda()
    torch.cuda.synchronize()
    theirs = method.encode(values, info, fc.Key(1))
    with device.on_side():
        mine = coding.encode(there, info, fc.Key(1))
        coding.add(mine, info, sum_there, sign)
    device.synchronize()
    mine = mine.cpu()
    if spec.startswith("onebit"):
        (scales, bits), (wanted, their_bits) = method.parts(mine, info), method.parts(theirs, info)
        torch.testing.assert_close(scales, wanted, rtol=1e-6, atol=0.0)
        assert torch.equal(bits, their_bits), (spec, count)
    else:
        assert torch.equal(mine, theirs), (spec, count)
    method.add(mine, info, total, sign)
    assert torch.equal(sum_there.cpu(), total), (spec, count, sign)


def _check_at_random(device: Device, kernels: Compressing, count: int) -> None:
    """Codes are one of the two steps beside a value, and their mean is the value."""
    method = fc.parse("int8")
    coding: Any = on_device("int8", kernels, adds=False)
    info, values = fc.BucketInfo.of([("t", (count,))]), torch.randn(count)
    there = values.cuda()
    torch.cuda.synchronize()
    with device.on_side():
        payload = coding.encode(there, info, fc.Key(1))
    device.synchronize()
    error = method.decode(payload.cpu(), info) - values
    step = float(values.abs().max()) / 127
    assert error.abs().max() <= step * 1.001, count
    # The deviation of a mean of so many, at most half a step each.
    assert error.mean().abs() <= 4 * step / (2 * count**0.5), count


def copy_us(device: Device) -> float:
    """Microseconds of copying the bucket on the device."""
    stream = torch.cuda.ExternalStream(device.side, device=0)
    one, other = torch.randn(COUNT, device="cuda"), torch.empty(COUNT, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        return median_us(lambda: other.copy_(one), stream)


def coded(device: Device, kernels: Compressing, spec: str) -> dict[str, float]:
    """Microseconds to encode the bucket, and to add one decoded payload, here and on the CPU."""
    stream = torch.cuda.ExternalStream(device.side, device=0)
    coding: Any = on_device(spec, kernels, adds=False)
    method, key = fc.parse(spec), fc.Key(1)
    info, values = fc.BucketInfo.of([("t", (COUNT,))]), torch.randn(COUNT)
    there, total, here = values.cuda(), torch.zeros(COUNT, device="cuda"), torch.zeros(COUNT)
    torch.cuda.synchronize()
    with device.on_side():
        payload = coding.encode(there, info, key)
        encode = median_us(lambda: coding.encode(there, info, key), stream)
        add = median_us(lambda: coding.add(payload, info, total), stream)
    device.synchronize()
    theirs = payload.cpu()
    return {
        "encode_us": round(encode, 1),
        "add_us": round(add, 1),
        "cpu_encode_us": round(_host_us(lambda: method.encode(values, info, key)), 1),
        "cpu_add_us": round(_host_us(lambda: method.add(theirs, info, here)), 1),
    }


def check_exchange() -> str:
    """What the runtime makes of a tensor on the device is what it makes of it on the CPU."""
    specs = ("int8:rounding=nearest", "topk:0.01", "fp16", "bf16")
    for spec in specs:
        memories = [fc.Feedback(fc.parse(spec)) for _ in range(2)]
        for step in range(3):
            tensor = torch.randn(1000, 100)
            found = [
                _exchanged(tensor.to(place), f"exchanged.{place}.{spec}", memory)
                for place, memory in zip(("cuda", "cpu"), memories, strict=True)
            ]
            for there, here in zip(*found, strict=True):
                assert there.is_cuda, (spec, step)
                assert torch.equal(there.cpu(), here), (spec, step)
    return f"{len(specs)} methods equal to the CPU over three steps with feedback"


def _exchanged(tensor: torch.Tensor, name: str, memory: fc.Feedback) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and what is remembered."""
    result = hvd.allreduce(tensor, name=name, compression=memory)
    residual = memory.memories.residual(name)
    assert residual is not None
    return result, residual


def exchange_us(spec: str, repeats: int = 30) -> float:
    """Median microseconds from the call until the device is done."""
    tensor = torch.randn(COUNT, device="cuda")
    memory: Any = "none" if spec == "none" else fc.Feedback(fc.parse(spec))
    times = []
    for _ in range(repeats + 5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        hvd.allreduce_(tensor, name=f"exchange.{spec}", compression=memory)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times[5:])


def _host_us(work: Any, repeats: int = 7) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


if __name__ == "__main__":
    main()
