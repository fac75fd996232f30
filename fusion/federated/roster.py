"""The beginning of federated training: ranks agree on the model and on who takes part.

Called by every rank alike, on the thread that trains; waits for all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from msgspec import Struct
from torch import nn

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
    process_set: ProcessSet = global_process_set,
) -> Roster:
    """Agree, and give every rank the model of the first one.

    Args:
        model: of the same structure on every rank; overwritten but on the first rank.
        clients: that this rank hosts; may be none.
        personal: patterns of what clients keep for themselves.
        process_set: the ranks that take part.

    Raises:
        MismatchError: the models differ in structure; on every rank.
        ValueError: two clients have one number, or no client has any data; on every rank.
    """
    ranks = group_of(process_set).ranks
    layout = Layout.of(model, personal)
    told = allgather_object(
        (layout, [(client.number, client.examples) for client in clients]), process_set=process_set
    )
    layout.require_same([its for its, _ in told], ranks)
    numbers = [(number, rank) for rank, (_, its) in zip(ranks, told, strict=True) for number, _ in its]
    for number, times in Counter(number for number, _ in numbers).items():
        if times > 1:
            where = [rank for its, rank in numbers if its == number]
            raise ValueError(
                f"client number {number} is used {times} times, on ranks {where}: number them apart"
            )
    examples = dict(sorted(pair for _, its in told for pair in its))
    if not any(examples.values()):
        raise ValueError(
            f"none of the {len(examples)} clients has any data, so there is nothing to train on: "
            "check how the data is split"
        )
    with torch.no_grad():
        broadcast_parameters(model.state_dict(), root_rank=ranks[0], process_set=process_set)
    return Roster(layout, examples, dict(numbers))
