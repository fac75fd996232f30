"""The plan: every threshold beside the optimal merging, and which threshold comes nearest to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from fusion.planning.costs import Costs
from fusion.planning.prediction import (
    Merging,
    Prediction,
    Settings,
    best_merging,
    predict,
    published_merging,
)
from fusion.planning.workload import PlanError, Workload

THRESHOLDS_MB = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 25.0, 32.0, 64.0, 128.0)
_ALIKE = 0.005
"""Steps that differ by less are equally good, and the smaller buffer wins."""


class Plan(msgspec.Struct, frozen=True):
    """What `fusion plan` found.

    Attributes:
        predictions: one for each threshold, ascending.
        best: the threshold to set.
        optimal: the best that any grouping of neighbours can do, each leaving as soon as it is complete.
        published: MG-WFBP's rule, for comparison.
    """

    workload: Workload
    costs: Costs
    settings: Settings
    predictions: tuple[Prediction, ...]
    best: Prediction
    optimal: Merging
    published: Merging

    def groups(self) -> list[list[str]]:
        """The optimal merging by names of tensors, as `DistributedOptimizer(groups=...)` takes parameters."""
        names = [tensor.name for tensor in self.workload.tensors]
        found, at = [], 0
        for size in self.optimal.groups:
            found.append(names[at : at + size])
            at += size
        return found

    def to_json(self) -> dict[str, Any]:
        """For programs; times in milliseconds, sizes in bytes."""
        return {
            "model": self.workload.name,
            "tensors": len(self.workload.tensors),
            "bytes": self.workload.nbytes,
            "forward_ms": 1e3 * self.workload.forward_s,
            "backward_ms": 1e3 * self.workload.backward_s,
            "ranks": self.costs.ranks,
            "nodes": list(self.costs.nodes),
            "algorithm": self.costs.algorithm,
            "buckets": self.settings.buckets,
            "cycle_time_ms": 1e3 * self.settings.cycle_s,
            "thresholds": [
                {
                    "fusion_threshold_mb": found.threshold_mb,
                    "buckets": found.buckets,
                    "cycles": found.cycles,
                    "step_ms": 1e3 * found.step_s,
                    "exposed_ms": 1e3 * found.exposed_s,
                    "buffer_bytes": found.buffer_bytes,
                }
                for found in self.predictions
            ],
            "best_fusion_threshold_mb": self.best.threshold_mb,
            "optimal": {**_merging(self.optimal), "groups": self.groups()},
            "mg_wfbp": _merging(self.published),
            "costs": msgspec.to_builtins(self.costs),
        }


def make_plan(
    workload: Workload, costs: Costs, settings: Settings, thresholds_mb: Sequence[float] = THRESHOLDS_MB
) -> Plan:
    """Predict the step at every threshold, and find the optimal merging.

    Args:
        settings: those to plan for; their threshold is predicted too.

    Raises:
        PlanError: there is one rank only.
    """
    if costs.ranks < 2:
        raise PlanError("one rank has nobody to reduce with: plan for two ranks or more (-np 2)")
    predictions = tuple(
        predict(workload, costs, msgspec.structs.replace(settings, threshold_mb=threshold))
        for threshold in sorted({*thresholds_mb, settings.threshold_mb})
    )
    fastest = min(found.step_s for found in predictions)
    best = min(
        (found for found in predictions if found.step_s <= fastest * (1 + _ALIKE)),
        key=lambda found: found.threshold_mb,
    )
    return Plan(
        workload,
        costs,
        settings,
        predictions,
        best,
        best_merging(workload, costs, settings.buckets, (found.groups for found in predictions)),
        published_merging(workload, costs, settings.buckets),
    )


def _merging(found: Merging) -> dict[str, Any]:
    return {"step_ms": 1e3 * found.step_s, "exposed_ms": 1e3 * found.exposed_s, "buckets": len(found.groups)}
