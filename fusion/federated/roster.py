"""The beginning of federated training: ranks agree on the model and on who takes part.

Called by every rank alike, on the thread that trains; waits for all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from msgspec import Struct
from torch import nn

from coordinator.errors import MismatchError
from fusion.federated.clients import Client
from fusion.federated.vector import Layout
from fusion.torch.functions import broadcast_parameters
from fusion.torch.objects import allgather_object
from fusion.torch.process_sets import ProcessSet, global_process_set, group_of


class Roster(Struct, frozen=True):
    """What all ranks know.

    Attributes:
        layout: of the model.
        examples: of every client, those without data included.
        ranks: that host the clients.
    """

    layout: Layout
    examples: dict[int, int]
    ranks: dict[int, int]

    def name(self, client: int) -> str:
        """A client and its rank, for messages."""
        return f"client {client} on rank {self.ranks[client]}"


def enrol(
    model: nn.Module,
    clients: Sequence[Client],
    personal: Sequence[str],
    settings: Mapping[str, object],
    process_set: ProcessSet = global_process_set,
) -> Roster:
    """Agree, and give every rank the model of the first one.

    Args:
        model: of the same structure on every rank; overwritten but on the first rank.
        clients: that this rank hosts; may be none.
        personal: patterns of what clients keep for themselves.
        settings: that must be the same on every rank; written out by `repr`.
        process_set: the ranks that take part.

    Raises:
        MismatchError: the models differ in structure, or the settings differ; on every rank.
        ValueError: two clients have one number, or no client has any data; on every rank.
    """
    ranks = group_of(process_set).ranks
    layout = agree(model, personal, settings, process_set)
    told = allgather_object([(client.number, client.examples) for client in clients], process_set=process_set)
    numbers = [(number, rank) for rank, its in zip(ranks, told, strict=True) for number, _ in its]
    for number, times in Counter(number for number, _ in numbers).items():
        if times > 1:
            where = [rank for its, rank in numbers if its == number]
            raise ValueError(
                f"client number {number} is used {times} times, on ranks {where}: number them apart"
            )
    examples = dict(sorted(pair for its in told for pair in its))
    if not any(examples.values()):
        raise ValueError(
            f"none of the {len(examples)} clients has any data, so there is nothing to train on: "
            "check how the data is split"
        )
    return Roster(layout, examples, dict(numbers))


def agree(
    model: nn.Module, personal: Sequence[str], settings: Mapping[str, object], process_set: ProcessSet
) -> Layout:
    """Check that all ranks mean the same, and give every rank the model of the first one.

    Raises:
        MismatchError: the models differ in structure, or the settings differ; on every rank.
    """
    ranks = group_of(process_set).ranks
    layout = Layout.of(model, personal)
    written = {name: repr(value) for name, value in settings.items()}
    told = allgather_object((layout, written), process_set=process_set)
    layout.require_same([its for its, _ in told], ranks)
    for rank, (_, its) in zip(ranks, told, strict=True):
        for name, value in its.items():
            first = told[0][1].get(name)
            if value != first:
                raise MismatchError(
                    f"{name} differs between ranks: it is {first} on rank {ranks[0]}, and {value} on "
                    f"rank {rank}; pass the same on every rank"
                )
    with torch.no_grad():
        broadcast_parameters(model.state_dict(), root_rank=ranks[0], process_set=process_set)
    return layout
