"""`overlap`: steps of a model over the 1 Gbit/s link, whose compute is about as long as its communication.

Shows the bars "overlap" and "DDP (gloo) on the same model". The batch is chosen
so that compute takes `ratio` times as long as reducing all gradients. Forward is
a third of the compute and has nothing to hide, so a ratio of 1.5 makes backward
as long as communication; the first layer's gradients always come last.

The limit is a step beside which a raw socket moves as many bytes both ways, from
the step's first moment: on a machine with a core for each rank, what the kernel
does for the link takes time from the computation whoever asks for it.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable
from typing import Any

import torch
from mpi4py import MPI
from torch import nn

import fusion.torch as hvd
from fusion.torch.optimizer import Buckets
from scripts.benchmarks import ours, peers
from scripts.benchmarks.raw_socket import RawLink
from scripts.benchmarks.timing import Contestant, Series, compare

COMPUTE = "compute alone"
COMMUNICATION = "communication alone, ours"
BESIDE_RAW = "compute beside a raw socket"
DYNAMIC = "step, ours dynamic"
STATIC = "step, ours static"
SEQUENTIAL = "step, ours without overlap"
DDP = "step, DDP (gloo)"
DDP_SMALL = "step, DDP (gloo), {:g} MiB buckets"

TRIAL_BATCH = 64


def measure(comm: MPI.Intracomm, options: dict[str, Any]) -> list[dict[str, Any]]:
    """One model, at each of the ratios. On every rank."""
    hvd.init(fusion_threshold_mb=options["threshold_mb"])
    peers.start_gloo(comm)
    raw = RawLink(comm)
    model = _model(options)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    results = []
    for ratio in options["ratios"]:
        communication = ours.dynamic([torch.zeros(shape) for shape in shapes], f"gradients.{ratio}")
        batch = _batch(comm, model, communication, ratio, options)
        alone = _step(model, batch, options["width"], torch.optim.SGD(model.parameters(), 1e-3))
        contestants = [
            Contestant(COMPUTE, alone),
            Contestant(COMMUNICATION, communication.run),
            Contestant(BESIDE_RAW, _beside(alone, raw.duplex(nbytes).run)),
            *_trainers(options, batch, ratio),
        ]
        series = compare(comm, contestants, rounds=options["rounds"], turn_s=options["turn_s"])
        results.append(_result(comm.size, batch, ratio, series, model))
    raw.close()
    peers.stop_gloo()
    hvd.shutdown()
    return results


def _trainers(options: dict[str, Any], batch: int, ratio: float) -> list[Contestant]:
    """The same model once for each way to train it."""
    width = options["width"]
    found = []
    forms: tuple[tuple[str, Buckets], ...] = ((DYNAMIC, "dynamic"), (STATIC, "static"))
    for label, buckets in forms:
        model = _model(options)
        named = [(f"{buckets}.{ratio}.{name}", parameter) for name, parameter in model.named_parameters()]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 1e-3), named_parameters=named, buckets=buckets
        )
        found.append(Contestant(label, _step(model, batch, width, optimizer)))
    model = _model(options)
    found.append(Contestant(SEQUENTIAL, _sequential(model, batch, width, f"sequential.{ratio}")))
    for label, megabytes in (
        (DDP, 25.0),
        (DDP_SMALL.format(options["threshold_mb"]), options["threshold_mb"]),
    ):
        wrapped = nn.parallel.DistributedDataParallel(_model(options), bucket_cap_mb=megabytes)
        found.append(
            Contestant(label, _step(wrapped, batch, width, torch.optim.SGD(wrapped.parameters(), 1e-3)))
        )
    return found


def _model(options: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(options["depth"]):
        layers += [nn.Linear(options["width"], options["width"]), nn.ReLU()]
    return nn.Sequential(*layers)


def _step(model: nn.Module, batch: int, width: int, optimizer: Any) -> Callable[[], None]:
    images = torch.randn(batch, width)

    def run() -> None:
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()

    return run


def _beside(step: Callable[[], None], transfer: Callable[[], object]) -> Callable[[], None]:
    """Both at once."""

    def run() -> None:
        moving = threading.Thread(target=transfer)
        moving.start()
        step()
        moving.join()

    return run


def _sequential(model: nn.Module, batch: int, width: int, scope: str) -> Callable[[], None]:
    """Backward, then all gradients, then the step: what overlap is measured against."""
    images = torch.randn(batch, width)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    parameters = list(model.parameters())

    def run() -> None:
        optimizer.zero_grad()
        model(images).square().mean().backward()
        handles = [
            hvd.allreduce_async_(parameter.grad, name=f"{scope}.{index}")
            for index, parameter in enumerate(parameters)
        ]
        for handle in handles:
            hvd.synchronize(handle)
        optimizer.step()

    return run


def _batch(
    comm: MPI.Intracomm, model: nn.Module, communication: Contestant, ratio: float, options: dict[str, Any]
) -> int:
    """How many samples make compute `ratio` times as long as communication; agreed."""
    batch = TRIAL_BATCH
    for _ in range(3):  # The cost of a sample falls with the batch, so the first guess is too small.
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        trial = Contestant("trial", _step(model, batch, options["width"], optimizer))
        found = compare(comm, [trial, communication], rounds=1, turn_s=options["turn_s"])
        compute, wire = (statistics.median(found[name].calls) for name in ("trial", communication.name))
        batch = comm.bcast(max(1, round(batch * ratio * wire / compute)), root=0)
    return batch


def _result(
    ranks: int, batch: int, ratio: float, series: dict[str, Series], model: nn.Module
) -> dict[str, Any]:
    compute, communication = series[COMPUTE].median, series[COMMUNICATION].median
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    return {
        "work": f"step of {nbytes / 2**20:.1f} MiB of parameters, batch {batch}, "
        f"compute/communication {ratio:g}",
        "ranks": ranks,
        "batch": batch,
        "series": {name: found.as_dict() for name, found in series.items()},
        "max_ms": 1e3 * max(compute, communication),
        "sum_ms": 1e3 * (compute + communication),
    }
