"""`plan`: steps as `fusion plan` predicts them beside the same steps really run.

On the ranks: measure the costs, time the model, predict the step for every
threshold and both kinds of buckets, then train with each setting and time it. The
same process does it all, one after the other, as `fusion plan` followed by a job.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from mpi4py import MPI

import fusion.torch as hvd
from fusion.planning import models
from fusion.planning.costs import Buckets
from fusion.planning.measure import Clock
from fusion.planning.prediction import Settings, best_merging
from fusion.planning.ranks import Spec, answer
from fusion.planning.report import make_plan

_WARM_UP = 3
"""Untimed steps. The first is negotiated in full, and static buckets are laid out anew after it."""


def measure(comm: MPI.Intracomm, options: dict[str, Any]) -> list[dict[str, Any]]:
    """All models of `options`. On every rank."""
    results = []
    for name in options["models"]:
        path = f"scripts.benchmarks.plan_models:{name}"
        found = comm.bcast(answer(comm, Spec(model=path, experiment_s=options["experiment_s"])), root=0)
        if found.error is not None:
            raise RuntimeError(found.error)
        for buckets in options["buckets"]:
            rows = []
            settings = Settings(64.0, options["cycle_time_ms"] / 1e3, buckets)
            plan = make_plan(found.workload, found.costs, settings, options["thresholds_mb"])
            for prediction in plan.predictions:
                measured = _trained(comm, path, buckets, prediction.threshold_mb, options)
                rows.append(
                    {
                        "threshold_mb": prediction.threshold_mb,
                        "buckets": prediction.buckets,
                        "predicted_ms": 1e3 * prediction.step_s,
                        "measured_ms": 1e3 * measured["seconds"],
                        "measured_buckets": measured["buckets"],
                        "error": prediction.step_s / measured["seconds"] - 1.0,
                    }
                )
            results.append(
                {
                    "work": f"{name}, {buckets} buckets",
                    "ranks": comm.size,
                    "compute_ms": 1e3 * found.workload.compute_s,
                    "optimal_ms": 1e3 * best_merging(found.workload, found.costs, buckets).step_s,
                    "best_threshold_mb": plan.best.threshold_mb,
                    "rows": rows,
                    "costs": _curve(found, buckets),
                }
            )
    return results


def _trained(
    comm: MPI.Intracomm, path: str, buckets: Buckets, threshold_mb: float, options: dict[str, Any]
) -> dict[str, float]:
    """Steps without the optimizer's update, as predictions are."""
    hvd.init(fusion_threshold_mb=threshold_mb, cycle_time_ms=options["cycle_time_ms"])
    model = models.load(path)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.module.parameters(), lr=0.0),
        named_parameters=model.module.named_parameters(),
        buckets=buckets,
    )

    def step() -> None:
        models.loss_of(model).backward()
        optimizer.synchronize()

    clock = Clock(comm)
    for _ in range(_WARM_UP):
        optimizer.zero_grad()
        clock.one(step)
        with optimizer.skip_synchronize():
            optimizer.step()
    times = []
    before = hvd.stats()
    for _ in range(options["steps"]):
        optimizer.zero_grad()
        times.append(clock.one(step))
        with optimizer.skip_synchronize():
            optimizer.step()
    done = hvd.stats().since(before)
    hvd.shutdown()
    return {
        "seconds": statistics.median(clock.slowest(times)),
        "buckets": done.buffers / options["steps"],
    }


def _curve(found: Any, buckets: Buckets) -> dict[str, Any]:
    import msgspec

    described: dict[str, Any] = msgspec.to_builtins(found.costs.curve(buckets))
    return described
