"""Clients: who trains, on which data.

A client is a number, the same whichever rank hosts it, and examples of its own.
It keeps between rounds what is its own alone: personal layers, and, in its
uplink, what compression has left out so far. Used by one thread at a time.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate


class ClientDropped(Exception):  # noqa: N818, it is an event, not an error
    """Raised by a client's training: it takes no part in this round, and may in the next."""


class Client:
    """One participant.

    Args:
        number: 0 or more, unique among the clients of all ranks.
        data: a tuple of tensors with one row an example each (`(images, labels)`), or a
            map-style dataset; may be empty.
        slowness: how many times slower its device is than this machine; the rest of the time
            is slept. 1 does not sleep.
        dropout: probability that it drops out of a round, for simulations.

    Attributes:
        number: as given.
        slowness: as given.
        dropout: as given.
        personal: values of personal layers, once it has trained.

    Raises:
        ValueError: a negative number, a slowness below 1, a dropout outside of [0, 1], or tensors of
            different lengths.
        TypeError: data that has no length.
    """

    def __init__(
        self,
        number: int,
        data: Sequence[Tensor] | Dataset[Any],
        *,
        slowness: float = 1.0,
        dropout: float = 0.0,
    ) -> None:
        self.number = operator.index(number)
        if self.number < 0:
            raise ValueError(f"a client's number must be 0 or more; got {number}")
        if not math.isfinite(slowness) or slowness < 1:
            raise ValueError(f"client {number}: slowness must be a finite number from 1 on; got {slowness}")
        if not 0 <= dropout <= 1:  # NaN is in no range.
            raise ValueError(f"client {number}: dropout must be from 0 to 1; got {dropout}")
        self.slowness = float(slowness)
        self.dropout = float(dropout)
        self.personal: dict[str, Tensor] = {}
        self._data = data
        self._examples = _length(self.number, data)

    def __repr__(self) -> str:
        return f"Client({self.number}, {self.examples} examples)"

    @property
    def examples(self) -> int:
        """How many examples it has; its weight in an average."""
        return self._examples

    def batches(
        self, batch_size: int, generator: torch.Generator, *, drop_last: bool = False
    ) -> Iterator[Any]:
        """One epoch: the examples once, shuffled.

        Args:
            drop_last: leave out what is over after the last whole batch, unless it is all there is.
        """
        order = torch.randperm(self.examples, generator=generator)
        if drop_last and self.examples > batch_size:
            order = order[: self.examples // batch_size * batch_size]
        for chosen in order.split(batch_size) if self.examples else ():
            yield self._batch(chosen)

    def _batch(self, chosen: Tensor) -> Any:
        if isinstance(self._data, (tuple, list)):
            return tuple(part[chosen] for part in self._data)
        return default_collate([self._data[index] for index in chosen.tolist()])


def _length(number: int, data: Any) -> int:
    if isinstance(data, (tuple, list)) and data and all(isinstance(part, Tensor) for part in data):
        lengths = {len(part) for part in data}
        if len(lengths) > 1:
            raise ValueError(
                f"client {number}: its tensors have different numbers of rows: {sorted(lengths)}"
            )
        return lengths.pop()
    if isinstance(data, (tuple, list)) or not hasattr(data, "__len__"):
        raise TypeError(
            f"client {number}: data must be a tuple of tensors or a dataset with a length, "
            f"not {type(data).__name__}"
        )
    return len(data)
