"""One record for each parameter that a `DistributedOptimizer` reduces, and which parameters those are.

Used on the thread that trains, and on autograd's threads during a backward pass.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle


class Parcel:
    """One gradient on its way through a reduction.

    Attributes:
        grad: what `parameter.grad` was when it was sent.
        dropped: the caller has thrown this gradient away since.
    """

    __slots__ = ("_version", "_wait", "dropped", "grad")

    def __init__(self, grad: torch.Tensor, wait: Callable[[], torch.Tensor]) -> None:
        self.grad = grad
        self.dropped = False
        self._version = grad._version
        self._wait = wait

    @property
    def disturbed(self) -> bool:
        """Somebody wrote to the gradient after it was sent."""
        return self.grad._version != self._version

    def wait(self) -> torch.Tensor:
        """The reduced gradient; raises if the reduction failed."""
        return self._wait()


class Slot:
    """A parameter and where its gradient is.

    Attributes:
        name: unique in the optimizer.
        index: position, the same on every rank.
        passes: backward passes since the last gradient was sent.
        parcels: what was sent in this window, in order.
        current: the last parcel, while `parameter.grad` is still what was sent.
        carry: an already reduced gradient that new ones are added to.
        settled: `parameter.grad` if that is the result of a reduction.
        disturbed: the gradient was written to while it was on its way.
    """

    __slots__ = (
        "carry",
        "current",
        "disturbed",
        "hooks",
        "index",
        "name",
        "parameter",
        "parcels",
        "passes",
        "settled",
    )

    def __init__(self, parameter: torch.Tensor, name: str, index: int) -> None:
        self.parameter = parameter
        self.name = name
        self.index = index
        self.hooks: list[RemovableHandle] = []
        self.reset()

    def reset(self) -> None:
        """Forget everything about gradients so far."""
        self.passes = 0
        self.parcels: list[Parcel] = []
        self.current: Parcel | None = None
        self.carry: torch.Tensor | None = None
        self.settled: tuple[torch.Tensor, int] | None = None
        self.disturbed = False

    def sent(self, parcel: Parcel) -> None:
        """Note that the present gradient has been sent."""
        self.parcels.append(parcel)
        self.current = parcel
        self.passes = 0

    def set_aside(self) -> None:
        """Make room for another gradient beside one that was sent or reduced already.

        The next backward pass then starts a gradient of its own, instead of
        adding to memory that other ranks read or to a value already reduced.
        """
        grad = self.parameter.grad
        if self.current is not None:
            self._inspect(self.current, grad)
            self.current = None
        elif grad is not None and self.settled is not None and grad is self.settled[0]:
            self.carry = grad.clone()
            self.settled = None
        else:
            return
        self.parameter.grad = None

    def inspect(self) -> None:
        """Note what the caller did to the gradient since it was sent."""
        if self.current is not None:
            self._inspect(self.current, self.parameter.grad)

    def _inspect(self, parcel: Parcel, grad: torch.Tensor | None) -> None:
        if grad is None:
            parcel.dropped = True
        elif grad is not parcel.grad or parcel.disturbed:
            self.disturbed = True

    @property
    def unchanged(self) -> bool:
        """The gradient is the result of a reduction, and nobody has written to it since."""
        if self.settled is None:
            return False
        grad, version = self.settled
        return self.parameter.grad is grad and grad._version == version


def reducible(parameter: torch.Tensor) -> bool:
    """Whether a parameter can have a gradient; integer parameters cannot."""
    return parameter.is_floating_point() or parameter.is_complex()


def names_of(
    groups: Sequence[dict[str, Any]], named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    """A unique name for every parameter of an optimizer, the same on every rank.

    Raises:
        ValueError: names are not pairs, not unique, or do not cover all parameters.
    """
    parameters = [parameter for group in groups for parameter in group["params"]]
    if named_parameters is None:
        return {
            parameter: f"group{number}.param{position}"
            for number, group in enumerate(groups)
            for position, parameter in enumerate(group["params"])
        }
    pairs: list[Any] = list(
        named_parameters.items() if isinstance(named_parameters, dict) else named_parameters
    )
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise ValueError("named_parameters must be pairs (name, parameter), like model.named_parameters()")
    twice = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    if twice:
        raise ValueError(
            f"named_parameters has names more than once: {', '.join(twice)}; give each model a prefix"
        )
    named = {parameter: name for name, parameter in reversed(pairs)}
    missing = sum(parameter not in named for parameter in parameters)
    if missing:
        raise ValueError(
            f"named_parameters does not name {missing} of the optimizer's {len(parameters)} parameters: "
            "pass the named_parameters() of every model it trains, or leave it out"
        )
    return {parameter: named[parameter] for parameter in parameters}


def check_parameters(names: dict[torch.Tensor, str]) -> None:
    """Refuse parameters whose gradients must not be averaged over all ranks.

    Raises:
        ValueError: a parameter is sharded, not initialized, or neither on the CPU nor on a GPU of NVIDIA.
    """
    for parameter, name in names.items():
        kinds = {kind.__name__ for kind in type(parameter).__mro__}
        if "DTensor" in kinds or "FlatParameter" in kinds or getattr(parameter, "_is_flat_param", False):
            raise ValueError(
                f"parameter '{name}' is a shard ({type(parameter).__name__}): other ranks hold other rows, "
                "which must not be averaged with these. FSDP and DTensor reduce gradients themselves; do "
                "not wrap their optimizer"
            )
        if "UninitializedTensorMixin" in kinds:
            raise ValueError(f"parameter '{name}' has no shape yet: run one forward pass before wrapping")
        if parameter.device.type not in ("cpu", "cuda", "meta"):
            raise ValueError(
                f"parameter '{name}' is on {parameter.device}, but only gradients on the CPU and on CUDA "
                "devices can be reduced"
            )
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed and names and all(name.startswith("module.") for name in names.values()):
        warnings.warn(
            "the model looks wrapped in DistributedDataParallel, which averages gradients too: "
            "use either that or DistributedOptimizer",
            stacklevel=4,
        )
