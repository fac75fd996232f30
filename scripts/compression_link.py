"""What crosses the link between two hosts, and how long a step takes, by compressor.

    scripts/two_hosts --gigabit -np 2 scripts/compression_link.py

Two hosts on this machine, joined by a cable of 1 Gbit/s (see tests/hosts.py), train a stack of
linear layers whose gradients are 25 MiB. For each method: the bytes that left the first host's
interface in a step, headers of TCP and negotiation included; what that would be by the method's
own statement; and the median time of a step. The step without communication is beside it. Prints
a table; rank 0 writes JSON if a path is given.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import fusion.torch as hvd
from fusion.compression import BucketInfo, Policy, parse

METHODS = [
    *("none", "fp16", "int8", "terngrad", "onebit", "powersgd:4", "topk:0.01", "randomk:0.01", "topk:0.001"),
]
INTERFACE = Path("/sys/class/net/fusion0/statistics/tx_bytes")
WIDTH, LAYERS = 1024, 6


def model() -> nn.Sequential:
    """Six weights of 1024 x 1024 and one of 256 x 1024, without biases: 25 MiB of gradients."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(256, WIDTH, bias=False), *(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
    )


def wire_bytes(method: str, network: nn.Module, size: int) -> float:
    """What one rank sends in a step: its share of a ring all-reduce, or of a ring all-gather."""
    compressor = parse(method)
    shapes = [(name, parameter.shape) for name, parameter in network.named_parameters()]
    payload = compressor.payload_bytes(BucketInfo.of(shapes))
    return payload * (2 * (size - 1) / size if compressor.linear else size - 1)


def measure(method: str | None, steps: int) -> dict[str, Any]:
    """Steps with a method, or with no communication; collective."""
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-4)
    if method is not None:
        compression = hvd.Compression.none if method == "none" else Policy(method)
        optimizer = hvd.DistributedOptimizer(optimizer, network.named_parameters(), compression=compression)
    inputs = torch.randn(16, 256, generator=torch.Generator().manual_seed(hvd.rank()))
    times, sent = [], []
    for _ in range(steps + 2):  # Two to lay out buckets and fill caches.
        optimizer.zero_grad()
        hvd.barrier()
        before, start = int(INTERFACE.read_text()), time.perf_counter()
        network(inputs).square().mean().backward()
        optimizer.step()
        times.append(time.perf_counter() - start)
        hvd.barrier()
        sent.append(int(INTERFACE.read_text()) - before)
    found = {"method": method or "no communication", "step_s": median(times[2:]), "sent": median(sent[2:])}
    if method is not None:
        stated = wire_bytes(method, network, hvd.size())
        found |= {"stated": stated, "ratio": wire_bytes("none", network, hvd.size()) / stated}
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description="Bytes and time of a step over a 1 Gbit/s link, by compressor."
    )
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--methods", nargs="*", default=METHODS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    results = [measure(method, options.steps) for method in (None, *options.methods)]
    if hvd.rank() == 0:
        print("| method | ratio | stated MB | sent MB | dense / sent | step ms | dense / step |")
        print("|---|---|---|---|---|---|---|")
        dense = next((each for each in results if each["method"] == "none"), results[-1])
        for each in results:
            stated = f"{each['ratio']:.4g}x | {each['stated'] / 1e6:.3f}" if "stated" in each else "- | -"
            sent = f"{each['sent'] / 1e6:.3f} | {dense['sent'] / each['sent']:.4g}x"
            took = f"{1e3 * each['step_s']:.0f} | {dense['step_s'] / each['step_s']:.1f}x"
            print(f"| {each['method']} | {stated} | {sent} | {took} |")
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")
    hvd.shutdown()


if __name__ == "__main__":
    main()
