"""Broadcast of state and of objects, where Horovod has them."""

import torch

import fusion.torch
from fusion.torch.functions import broadcast_parameters
from fusion.torch.objects import allgather_object, broadcast_object
from fusion.torch.process_sets import ProcessSet, global_process_set

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """`fusion.torch.broadcast_optimizer_state`, which leaves gradients alone, with what Horovod does to them.

    Horovod fills the state of a fresh optimizer by a step, for which it makes
    gradients of zeros. Scripts may find them there.
    """
    fresh = not optimizer.state_dict()["state"]
    fusion.torch.broadcast_optimizer_state(optimizer, root_rank, model, process_set)
    if not fresh:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
