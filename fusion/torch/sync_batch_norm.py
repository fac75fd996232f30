"""`SyncBatchNorm`: batch normalization over the samples of all ranks.

A drop-in for torch's `BatchNorm1d`, `2d` and `3d` in training: outputs, running
statistics and the gradient of the input are those of one process that has the
batches of all ranks. The gradients of weight and bias are this rank's share, as
those of any parameter are; a `DistributedOptimizer` reduces them.

Sums are accumulated in float64. Used on the thread that trains and on autograd's;
each forward and each backward pass waits for one all-reduce of 2 C + 1 numbers,
so every rank must run the same layers in the same order. In eval mode nothing is
sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from fusion.torch.ops import Sum, allreduce_
from fusion.torch.process_sets import ProcessSet, global_process_set, group_of

CHUNK = 1 << 20
"""Elements that are widened to float64 at once."""


class SyncBatchNorm(_BatchNorm):
    """Batch normalization of inputs of shape (N, C) or (N, C, ...) over all ranks.

    Ranks may have different numbers of samples, also none.

    Args:
        num_features: C.
        eps: added to the variance.
        momentum: share of the new statistics in the running ones; None for the
            average over all batches so far.
        affine: whether there are weight and bias.
        track_running_stats: whether there are running statistics for eval mode;
            without them, eval mode uses the statistics of this rank's batch.
        process_set: the ranks that take part.

    Raises:
        ValueError: in `forward`: the input has fewer than 2 dimensions, or all ranks
            together have one value a channel only.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        process_set: ProcessSet = global_process_set,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_set = process_set

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_set: ProcessSet = global_process_set
    ) -> torch.nn.Module:
        """Replace every batch normalization in `module` by one over all ranks with the same state.

        Returns:
            `module`, or its replacement if it is a batch normalization itself.
        """
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            made = cls(
                module.num_features,
                module.eps,
                module.momentum,
                module.affine,
                module.track_running_stats,
                process_set=process_set,
            )
            made._parameters, made._buffers = module._parameters, module._buffers
            return made.train(module.training)
        for name, child in module.named_children():
            setattr(module, name, cls.convert_sync_batchnorm(child, process_set))
        return module

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name for it
        """Normalize; in training mode, by the statistics of all ranks."""
        self._check_input_dim(input)
        if not self.training or group_of(self.process_set).topology.size == 1:
            return super().forward(input)
        return self._synchronized(input)

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002 - overrides torch's
        if input.dim() < 2:
            raise ValueError(
                f"SyncBatchNorm needs an input of 2 dimensions (N, C) or more, not {input.dim()}"
            )
        if input.shape[1] != self.num_features:
            raise ValueError(
                f"SyncBatchNorm was made for {self.num_features} channels, but the input has {input.shape[1]}"
            )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _synchronized(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as in forward
        output, mean, variance, count = _Normalize.apply(
            input, self.weight, self.bias, self.eps, self.process_set
        )
        if self.track_running_stats:
            self._track(mean, variance * count / (count - 1))
        return output

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean), share)
        self.running_var.lerp_(variance.to(self.running_var), share)


class _Normalize(torch.autograd.Function):
    """Returns the output, and over all ranks the mean, the biased variance and the values a channel."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        process_set: ProcessSet,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        sums, squares = _forward_sums(x)
        values = torch.tensor([_values(x)], dtype=torch.float64, device=x.device)
        totals = torch.cat([sums, squares, values])
        _all_reduce(totals, "forward", process_set)
        sums, squares, count = totals.split([len(sums), len(sums), 1])
        # A device is asked for the number only where it may be too small, since asking waits for it.
        if _values(x) <= 1 and count.item() <= 1:
            raise ValueError(
                "SyncBatchNorm needs more than one value a channel in training, but all ranks together have "
                f"{int(count.item())} (this rank's input: {tuple(x.shape)})"
            )
        mean = sums / count
        variance = (squares / count - mean.square()).clamp_(min=0.0)
        inverse = (variance + eps).rsqrt()
        scale = inverse if weight is None else inverse * weight.double()
        shift = -mean * scale if bias is None else bias.double() - mean * scale
        wide = _wide(x)
        output = torch.addcmul(_along(shift, x, wide), _along(scale, x, wide), x.to(wide)).to(x.dtype)
        ctx.save_for_backward(x, weight, mean, inverse, scale, count)
        ctx.process_set = process_set
        ctx.mark_non_differentiable(mean, variance, count)
        return output, mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, inverse, scale, count = ctx.saved_tensors
        sums, products = _backward_sums(grad, x, mean)
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_weight = (products * inverse).to(weight.dtype) if needs_weight else None
        grad_bias = sums.to(weight.dtype) if needs_bias else None
        if not needs_input:
            return None, grad_weight, grad_bias, None, None
        totals = torch.cat([sums, products])
        _all_reduce(totals, "backward", ctx.process_set)
        sums, products = (totals / count).chunk(2)
        # With d = x - mean: scale * (grad - sums - d * inverse^2 * products), as one line in x.
        slope = -scale * inverse.square() * products
        offset = -scale * sums - slope * mean
        wide = _wide(x)
        grad_input = torch.addcmul(_along(offset, x, wide), _along(slope, x, wide), x.to(wide))
        grad_input.addcmul_(_along(scale, x, wide), grad.to(wide))
        return grad_input.to(x.dtype), grad_weight, grad_bias, None, None


def _all_reduce(totals: torch.Tensor, which: str, process_set: ProcessSet) -> None:
    """Sum in place over the ranks; calls come in the same order on all of them, so a size is name enough."""
    group = group_of(process_set)
    name = group.unnamed(f"sync_batch_norm.{which}.{len(totals)}", blocking=True)
    allreduce_(totals, op=Sum, name=name, process_set=process_set)


def _forward_sums(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each channel: the sum and the sum of squares."""
    sums, squares = torch.zeros(2, x.shape[1], dtype=torch.float64, device=x.device).unbind()
    for rows in _chunks(x):
        wide = x[rows].double()
        sums += wide.sum(_all_but_channels(x))
        squares += wide.square().sum(_all_but_channels(x))
    return sums, squares


def _backward_sums(
    grad: torch.Tensor, x: torch.Tensor, mean: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each channel: the sum of the gradient, and of gradient times (x - mean)."""
    sums, products = torch.zeros(2, x.shape[1], dtype=torch.float64, device=x.device).unbind()
    center = _along(mean, x, torch.float64)
    for rows in _chunks(x):
        wide = grad[rows].double()
        sums += wide.sum(_all_but_channels(x))
        products += (x[rows].double() - center).mul_(wide).sum(_all_but_channels(x))
    return sums, products


def _chunks(x: torch.Tensor) -> Iterator[slice]:
    """Rows of about `CHUNK` elements together, which fit a core's cache; on a device, all rows."""
    rows = max(1, CHUNK // max(1, x[:1].numel())) if x.is_cpu else max(1, len(x))
    for at in range(0, len(x), rows):
        yield slice(at, at + rows)


def _values(x: torch.Tensor) -> int:
    """How many values a channel has."""
    return x.numel() // x.shape[1]


def _all_but_channels(x: torch.Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _along(values: torch.Tensor, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One value a channel, in a shape that combines with `x`."""
    return values.to(dtype).view(-1, *[1] * (x.dim() - 2))


def _wide(x: torch.Tensor) -> torch.dtype:
    """What elements are computed in."""
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
