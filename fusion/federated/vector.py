"""A model as one flat vector, so that all of it travels in one message.

`Layout` says what of a model is shared and where it lies; `ModelState` holds the
values. Trainable parameters and floating-point buffers (running statistics) lie in
one vector, parameters first; whole-number and bool buffers (`num_batches_tracked`)
lie in a second one, whose rule of combination is the maximum: an average of them
would be no count. Called on any thread; no hidden state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from msgspec import Struct
from torch import Tensor, nn

from coordinator.errors import MismatchError


class Piece(Struct, frozen=True):
    """One tensor of the model."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return int(torch.Size(self.shape).numel())

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


class ModelState(NamedTuple):
    """The shared values of a model, or what changed in them.

    Attributes:
        values: 1-D float32 or float64; parameters, then floating-point buffers.
        counters: 1-D int64; all other buffers.
    """

    values: Tensor
    counters: Tensor

    def clone(self) -> ModelState:
        """A copy of its own."""
        return ModelState(self.values.clone(), self.counters.clone())


class Layout(Struct, frozen=True):
    """What of a model is shared, in order.

    Attributes:
        parameters: those that require a gradient; others never change.
        buffers: floating-point buffers that `state_dict` has.
        counters: the other buffers that `state_dict` has.
        personal: names of parameters and buffers that are each client's own.
        dtype: of `ModelState.values`: float32, or float64 if the model has such values.
    """

    parameters: tuple[Piece, ...]
    buffers: tuple[Piece, ...]
    counters: tuple[Piece, ...]
    personal: tuple[str, ...]
    dtype: str

    @classmethod
    def of(cls, model: nn.Module, personal: Sequence[str] = ()) -> Layout:
        """The layout of a model.

        Args:
            personal: shell patterns (`bn*.weight`) of names that are not shared.

        Raises:
            TypeError: a shared tensor is complex.
            ValueError: there is no parameter to train and to share, or a pattern that matches nothing.
        """
        parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
        saved = model.state_dict(keep_vars=True)
        buffers = {name: value for name, value in model.named_buffers() if name in saved}
        own = _matching([*parameters, *buffers], personal)
        shared = [_piece(name, value) for name, value in {**parameters, **buffers}.items() if name not in own]
        floating = [piece for piece in shared if getattr(torch, piece.dtype).is_floating_point]
        if not any(piece.name in parameters for piece in floating):
            raise ValueError("the model has no parameter that is both trainable and shared")
        return cls(
            parameters=tuple(piece for piece in floating if piece.name in parameters),
            buffers=tuple(piece for piece in floating if piece.name in buffers),
            counters=tuple(piece for piece in shared if piece not in floating),
            personal=tuple(name for name in [*parameters, *buffers] if name in own),
            dtype="float64" if any(piece.dtype == "float64" for piece in floating) else "float32",
        )

    @property
    def trained(self) -> int:
        """Elements of `ModelState.values` that are parameters."""
        return sum(piece.numel for piece in self.parameters)

    @property
    def size(self) -> int:
        """Elements of `ModelState.values`."""
        return self.trained + sum(piece.numel for piece in self.buffers)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of `ModelState.values`."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @torch.no_grad()
    def read(self, model: nn.Module) -> ModelState:
        """A copy of the shared values of a model of this layout."""
        values = _tensors(model, (*self.parameters, *self.buffers))
        counters = _tensors(model, self.counters)
        return ModelState(_flat(values, self.torch_dtype), _flat(counters, torch.int64))

    @torch.no_grad()
    def write(self, model: nn.Module, state: ModelState) -> None:
        """Overwrite the shared values of a model; each keeps its dtype."""
        _spread(state.values, _tensors(model, (*self.parameters, *self.buffers)))
        _spread(state.counters, _tensors(model, self.counters))

    def read_personal(self, model: nn.Module) -> dict[str, Tensor]:
        """Copies of what is the client's own."""
        found = _by_name(model)
        return {name: found[name].detach().clone() for name in self.personal}

    @torch.no_grad()
    def write_personal(self, model: nn.Module, values: dict[str, Tensor]) -> None:
        """Put back what `read_personal` gave."""
        found = _by_name(model)
        for name, value in values.items():
            found[name].copy_(value)

    def require_same(self, layouts: Sequence[Layout], ranks: Sequence[int]) -> None:
        """Check that all ranks build the same model.

        Args:
            layouts: of every rank, in the order of `ranks`.

        Raises:
            MismatchError: they differ; names the ranks and the first tensor, with both descriptions.
        """
        for rank, other in zip(ranks, layouts, strict=True):
            if other != layouts[0]:
                mine, theirs = _first_difference(layouts[0], other)
                raise MismatchError(
                    f"the model differs between ranks: rank {ranks[0]} has {mine}, rank {rank} has {theirs}; "
                    "build the same model, with the same personal layers, on every rank"
                )


def _matching(names: Sequence[str], patterns: Sequence[str]) -> set[str]:
    if isinstance(patterns, str):
        raise TypeError(f"personal is a list of patterns, not the string {patterns!r}")
    own: set[str] = set()
    for pattern in patterns:
        found = {name for name in names if fnmatchcase(name, pattern)}
        if not found:
            raise ValueError(f"personal pattern {pattern!r} matches no parameter or buffer of the model")
        own |= found
    return own


def _piece(name: str, value: Tensor) -> Piece:
    if value.is_complex():
        raise TypeError(f"'{name}' is complex; keep its real and imaginary parts as a real parameter")
    return Piece(name, tuple(value.shape), str(value.dtype).removeprefix("torch."))


def _by_name(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _tensors(model: nn.Module, pieces: Iterable[Piece]) -> list[Tensor]:
    found = _by_name(model)
    return [found[piece.name] for piece in pieces]


def _flat(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    if not tensors:
        return torch.empty(0, dtype=dtype)
    return torch.cat([tensor.detach().reshape(-1).to(dtype) for tensor in tensors])


def _spread(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))


def _first_difference(one: Layout, other: Layout) -> tuple[Any, Any]:
    for field in ("parameters", "buffers", "counters", "personal"):
        mine, theirs = getattr(one, field), getattr(other, field)
        for left, right in zip(mine, theirs, strict=False):
            if left != right:
                return left, right
        if len(mine) != len(theirs):
            longer = max(mine, theirs, key=len)
            extra = longer[min(len(mine), len(theirs))]
            return (extra, "no such tensor") if longer is mine else ("no such tensor", extra)
    return one.dtype, other.dtype
