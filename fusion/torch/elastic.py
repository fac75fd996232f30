"""Horovod's elastic interface for a job whose ranks stay the same.

Scripts written for it run: state is made equal on all ranks, committed and
restored, and samplers remember how far they got. What is not offered is going on
with other ranks: when one is lost, `run` says so and the job ends. Called by every
rank alike, on one thread.
"""

from __future__ import annotations

import copy
import functools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

import torch

from coordinator.errors import FusionError
from fusion import runtime
from fusion.torch.functions import broadcast_optimizer_state, broadcast_parameters
from fusion.torch.objects import broadcast_object


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes its first argument, a `State`, equal on all ranks, then calls `function`.

    Raises (when called):
        FusionError: a collective failed, for instance because a rank was lost. The
            state is back at its last commit, so that the caller may save it.
    """

    @functools.wraps(function)
    def synced(state: State, *args: Any, **kwargs: Any) -> Any:
        try:
            state.sync()
            return function(state, *args, **kwargs)
        except FusionError as error:
            state.restore()
            error.add_note(
                "This runtime does not replace lost ranks. The state was put back to its last commit: "
                "save it on every step that may be the last, and start the job again from there."
            )
            raise

    return synced


class State:
    """What a training loop must not lose. Subclasses say how it is saved, restored and shared."""

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Take functions to call when ranks come or go, which does not happen here: they are not called."""

    def commit(self) -> None:
        """Remember the present values."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Do nothing: the hosts of a job stay."""

    def save(self) -> None:
        """Remember the present values."""

    def restore(self) -> None:
        """Go back to the values that were remembered last."""

    def sync(self) -> None:
        """Give every rank the values of rank 0, and remember them."""


class ObjectState(State):
    """Attributes that are plain Python objects.

    Args:
        bcast_object: not used; for scripts that pass it.
        get_rank: not used; for scripts that pass it.
        values: the attributes and their first values.
    """

    def __init__(self, bcast_object: Any = None, get_rank: Any = None, **values: Any) -> None:  # noqa: ARG002
        self._saved: dict[str, Any] = {}
        for name, value in values.items():
            setattr(self, name, value)
        self._names = tuple(values)
        ObjectState.save(self)

    def save(self) -> None:
        """Remember the present values."""
        self._saved = {name: copy.deepcopy(getattr(self, name)) for name in self._names}

    def restore(self) -> None:
        """Go back to the values that were remembered last."""
        for name, value in self._saved.items():
            setattr(self, name, copy.deepcopy(value))

    def sync(self) -> None:
        """Give every rank the values of rank 0, and remember them."""
        if self._names:
            self._saved = broadcast_object({name: getattr(self, name) for name in self._names}, root_rank=0)
            ObjectState.restore(self)


class TorchState(ObjectState):
    """Models, optimizers and samplers, and plain objects beside them.

    Args:
        model: or None.
        optimizer: or None.
        values: further attributes. Modules, optimizers and `ElasticSampler`s are saved
            by their `state_dict`.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **values: Any) -> None:
        values = {"model": model, "optimizer": optimizer, **values}
        self._stateful = tuple(name for name, value in values.items() if _is_stateful(value))
        self._dicts: dict[str, Any] = {}
        for name in self._stateful:
            setattr(self, name, values.pop(name))
        super().__init__(**values)
        self._save_dicts()

    def save(self) -> None:
        """Remember the present values."""
        self._save_dicts()
        super().save()

    def restore(self) -> None:
        """Go back to the values that were remembered last."""
        for name, state in self._dicts.items():
            getattr(self, name).load_state_dict(copy.deepcopy(state))
        super().restore()

    def sync(self) -> None:
        """Give every rank the values of rank 0, and remember them."""
        for name in self._stateful:
            _sync(getattr(self, name))
        super().sync()
        self._save_dicts()

    def _save_dicts(self) -> None:
        self._dicts = {name: copy.deepcopy(getattr(self, name).state_dict()) for name in self._stateful}


def _is_stateful(value: Any) -> bool:
    return isinstance(value, torch.nn.Module | torch.optim.Optimizer | ElasticSampler)


def _sync(value: Any) -> None:
    if isinstance(value, torch.nn.Module):
        broadcast_parameters(value.state_dict(), root_rank=0)
    elif isinstance(value, torch.optim.Optimizer):
        broadcast_optimizer_state(value, root_rank=0)
    else:
        value.load_state_dict(broadcast_object(value.state_dict(), root_rank=0))


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Gives each rank its share of what is left of an epoch.

    Shares are equally long: some samples come twice where the number of ranks does not
    divide what is left.

    Args:
        dataset: anything with a length, the same on every rank.
        shuffle: in an order that depends on `seed` and the epoch.
        seed: the same on every rank.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. Call it at the end of the one before."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:  # noqa: ARG002 - Horovod's signature
        """Note that every rank has done with `batch_size` more samples."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """How far the epoch got."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on where another sampler was."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Share out what is left among the ranks."""
        topology = runtime.current().topology
        self.num_replicas, self.rank = topology.size, topology.rank
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)  # noqa: S311 - nothing secret
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        left = self.remaining_indices
        repeats = math.ceil(self.total_size / len(left)) if left else 0
        return iter((left * repeats)[self.rank : self.total_size : self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
