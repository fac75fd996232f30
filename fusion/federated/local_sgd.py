"""Ordinary training that talks every few steps: local SGD, post-local SGD, DiLoCo.

Each rank steps its own optimizer; every `every` steps the ranks average how far they
have come, and an outer optimizer takes one step along that average. Called on the
thread that trains; all ranks must take the same number of steps.

Local SGD: Stich, ICLR 2019. Post-local SGD: Lin et al., "Don't use large mini-batches,
use local SGD", ICLR 2020. DiLoCo: Douillard et al., arXiv 2311.08105.

Cost: one all-reduce of the parameters in `every` steps, so `every` times fewer bytes
than averaging gradients; with compression one all-gather of payloads. Memory: the
parameters once more as one vector, and the outer optimizer's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fusion.compression import Compressor
from fusion.federated.roster import agree
from fusion.federated.uplink import Uplink, compressor_of
from fusion.federated.vector import ModelState
from fusion.torch.ops import Average, Max, Sum, allgather, allreduce_
from fusion.torch.process_sets import ProcessSet, global_process_set, group_of

MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


class LocalSGD:
    """Average the models every few steps of an optimizer, through hooks on its `step`.

        local = LocalSGD(model, optimizer, every=8)
        for batch in batches:  # this rank's own
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()  # every 8th one averages
        local.synchronize()  # what is left at the end

    Momentum and the like of the optimizer stay each rank's own. Trainable parameters and
    floating-point buffers are averaged, other buffers become the largest. Making one is
    collective, and gives every rank the first rank's model.

    Args:
        model: of the same structure on every rank.
        optimizer: of the model's parameters; not a `DistributedOptimizer`.
        every: steps between averages, 1 or more.
        warmup_steps: the first steps average gradients instead, before they are used, as post-local
            SGD does.
        outer: makes the outer optimizer of the one flat vector it is given, whose gradient is the
            average of start minus trained; default: plain averaging.
        compression: of what is averaged, with error feedback; see `fusion.federated.uplink`.
        process_set: the ranks that take part.

    Attributes:
        steps: of the optimizer so far.

    Raises:
        ValueError: a number out of range, or a `DistributedOptimizer`.
        MismatchError: the models differ in structure, or the settings; on every rank.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int,
        *,
        warmup_steps: int = 0,
        outer: MakeOptimizer | None = None,
        compression: Compressor | str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        if every < 1 or warmup_steps < 0:
            raise ValueError(
                f"every must be 1 or more and warmup_steps 0 or more; got {every} and {warmup_steps}"
            )
        if hasattr(optimizer, "skip_synchronize"):
            raise ValueError(
                "a DistributedOptimizer averages gradients in every step already: pass a plain optimizer"
            )
        self._model, self._every, self._warmup_steps = model, every, warmup_steps
        self._process_set = process_set
        settings = {"every": every, "warmup_steps": warmup_steps, "compression": compressor_of(compression)}
        self._layout = agree(model, (), settings, process_set)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._uplink = None if compressor_of(compression) is None else Uplink(self._layout, compression, 0)
        self._place = group_of(process_set).topology.rank
        if self._uplink is not None:
            self._uplink.add_client(self._place)
        self._scope = group_of(process_set).unnamed("local_sgd", blocking=False)
        self._start = nn.Parameter(self._layout.read(model).values[: self._layout.trained])
        self._outer = _plain(self._start) if outer is None else outer([self._start])
        self.steps = 0
        self._fresh = True
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def synchronize(self) -> None:
        """Average now, unless nothing has changed since the last time; every rank must call it."""
        if self._fresh:
            return
        layout = self._layout
        state = layout.read(self._model)
        trained, buffers = state.values.split([layout.trained, layout.size - layout.trained])
        self._start.grad = self._mean(self._start.detach() - trained)
        self._outer.step()
        for values, op, name in ((buffers, Average, "buffers"), (state.counters, Max, "counters")):
            if values.numel():
                allreduce_(values, op=op, name=f"{self._scope}.{name}", process_set=self._process_set)
        layout.write(self._model, ModelState(torch.cat([self._start.detach(), buffers]), state.counters))
        self._fresh = True

    def close(self) -> None:
        """Take the hooks off the optimizer."""
        for hook in self._hooks:
            hook.remove()

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to go on later, beside the model and the optimizer."""
        return {
            "steps": self.steps,
            "fresh": self._fresh,
            "start": self._start.detach().clone(),
            "outer": self._outer.state_dict(),
            "compression": {} if self._uplink is None else self._uplink.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that this rank had; every rank must do so.

        Raises:
            ValueError: it is of another model.
        """
        if state["start"].shape != self._start.shape:
            raise ValueError(
                f"this state is of a model of {state['start'].numel()} parameters, but the model has "
                f"{self._start.numel()}: build the model that it was saved with"
            )
        self.steps, self._fresh = state["steps"], state["fresh"]
        with torch.no_grad():
            self._start.copy_(state["start"])
        self._outer.load_state_dict(state["outer"])
        if self._uplink is not None:
            self._uplink.load_state_dict(state["compression"])

    def _mean(self, change: Tensor) -> Tensor:
        """Average over ranks of a vector of the size of the parameters."""
        if self._uplink is None:
            return allreduce_(change, op=Average, name=f"{self._scope}.change", process_set=self._process_set)
        payload = self._uplink.encode(self._place, change)
        sent = payload.reshape(1, -1)
        payloads = allgather(sent, name=f"{self._scope}.payload", process_set=self._process_set)
        self._uplink.settle(self._place, used=True)
        mean = torch.zeros_like(change)
        for theirs in payloads:
            mean += self._uplink.decode(theirs)
        return mean / len(payloads)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.steps >= self._warmup_steps:
            return
        # PyTorch passes the optimizer itself first to some versions of the hook.
        closures = [
            value for value in (*args, *kwargs.values()) if callable(value) and value is not optimizer
        ]
        if closures:
            raise ValueError(
                "warmup_steps does not go with a closure, whose gradients come after they are averaged"
            )
        self._average_gradients()

    def _after_step(self, _optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self.steps += 1
        if self.steps <= self._warmup_steps:
            # All ranks have taken the same step; the outer optimizer begins where they are.
            with torch.no_grad():
                self._start.copy_(self._layout.read(self._model).values[: self._layout.trained])
            return
        self._fresh = False
        if (self.steps - self._warmup_steps) % self._every == 0:
            self.synchronize()

    @torch.no_grad()
    def _average_gradients(self) -> None:
        """One all-reduce of all gradients, and of who has any: a parameter nobody used keeps none."""
        present = torch.tensor([float(parameter.grad is not None) for parameter in self._parameters])
        parts = [
            torch.zeros(parameter.numel()) if parameter.grad is None else parameter.grad.reshape(-1)
            for parameter in self._parameters
        ]
        flat = torch.cat([*(part.to(self._layout.torch_dtype) for part in parts), present])
        allreduce_(flat, op=Sum, name=f"{self._scope}.gradients", process_set=self._process_set)
        size = group_of(self._process_set).topology.size
        sizes = [parameter.numel() for parameter in self._parameters]
        *sums, present = flat.split([*sizes, len(sizes)])
        for parameter, total, count in zip(self._parameters, sums, present.tolist(), strict=True):
            if count:
                mean = (total / size).view(parameter.shape).to(parameter.dtype)
                parameter.grad = mean if parameter.grad is None else parameter.grad.copy_(mean)


class DiLoCo(LocalSGD):
    """`LocalSGD` whose outer optimizer is SGD with Nesterov momentum, as in the paper.

    Args:
        model, optimizer, compression, process_set: as for `LocalSGD`; the paper's inner optimizer is AdamW.
        every: the paper's H, hundreds of steps.
        outer_lr, outer_momentum: of the outer optimizer.

    Raises:
        ValueError: as for `LocalSGD`; a learning rate or momentum out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int,
        *,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        compression: Compressor | str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        def outer(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters, lr=outer_lr, momentum=outer_momentum, nesterov=True)

        if not outer_lr > 0 or not 0 < outer_momentum < 1:
            raise ValueError(
                "outer_lr must be above 0 and outer_momentum between 0 and 1; "
                f"got {outer_lr} and {outer_momentum}"
            )
        super().__init__(
            model, optimizer, every, outer=outer, compression=compression, process_set=process_set
        )


def _plain(start: nn.Parameter) -> torch.optim.Optimizer:
    """Ends where the ranks are on average."""
    return torch.optim.SGD([start], lr=1.0)
