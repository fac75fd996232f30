"""One call that averages the models of all ranks, for programs that keep their own loop."""

from __future__ import annotations

import math

import torch
from torch import nn

from fusion.federated.vector import Layout, ModelState
from fusion.torch.objects import allgather_object
from fusion.torch.ops import Max, Sum, allreduce_
from fusion.torch.process_sets import ProcessSet, global_process_set, group_of


def fedavg(model: nn.Module, weight: float = 1.0, process_set: ProcessSet = global_process_set) -> None:
    """Replace a model on every rank by the weighted average of all ranks' models; every rank calls it.

    Trainable parameters and floating-point buffers (running statistics) are averaged;
    whole-number and bool buffers become the largest of those of positive weight. A rank of
    weight 0 has no influence, whatever its values are, and gets the average too.

    Args:
        model: of the same structure on every rank; overwritten.
        weight: of this rank's model, 0 or more: the number of examples it was trained on.
        process_set: the ranks that take part.

    Raises:
        ValueError: a weight is negative or not finite, or all are 0; on every rank, and no model changes.
        MismatchError: the models differ in structure; on every rank.
    """
    group = group_of(process_set)
    layout = Layout.of(model)
    told = allgather_object((float(weight), layout), process_set=process_set)
    weights = [its for its, _ in told]
    _check(weights, group.ranks)
    layout.require_same([its for _, its in told], group.ranks)
    # Divided before the sum, so that no sum of large weights overflows.
    share = weight / max(weights) / sum(its / max(weights) for its in weights)
    state = layout.read(model)
    values = state.values * share if weight else torch.zeros_like(state.values)
    counters = state.counters if weight else torch.full_like(state.counters, torch.iinfo(torch.int64).min)
    scope = group.unnamed("fedavg", blocking=True)
    allreduce_(values, op=Sum, name=f"{scope}.values", process_set=process_set)
    if len(counters):
        allreduce_(counters, op=Max, name=f"{scope}.counters", process_set=process_set)
    layout.write(model, ModelState(values, counters))


def _check(weights: list[float], ranks: tuple[int, ...]) -> None:
    for rank, weight in zip(ranks, weights, strict=True):
        if not math.isfinite(weight) or weight < 0:
            raise ValueError(
                f"the weight of a model must be a finite number from 0 on; rank {rank} gave {weight}"
            )
    if not any(weights):
        raise ValueError(
            "all ranks gave weight 0, so there is nothing to average; the models were left alone"
        )
