"""The average over clients of all ranks, and who has answered, in one collective operation.

Two ways. Whole changes are summed: each rank adds up its clients' changes, each
multiplied by its share of the chosen examples, and one all-reduce does the rest. The
shares are known beforehand and add up to at most 1, so no sum overflows, and clients
that stay away cost nothing but a division. Compressed changes are gathered: payloads
of different clients cannot be added without losing what makes them small, so every
rank gets all of them and adds them in the order of the clients. Both give the same
bits on every rank. Collective; called on the thread that trains.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from msgspec import Struct
from torch import Tensor

from fusion.federated.messages import Change, Message, Regret, pack, unpack_all
from fusion.federated.roster import Roster
from fusion.federated.uplink import Uplink
from fusion.federated.vector import ModelState
from fusion.federated.workbench import Absence, Update
from fusion.torch.ops import Max, Sum, allgather, allreduce_
from fusion.torch.process_sets import ProcessSet, group_of

_NO_COUNT = torch.iinfo(torch.int64).min


class Combined(Struct, frozen=True):
    """What came of a round's training.

    Attributes:
        change: average over those that answered, weighted by examples; its counters are the
            largest after training. Without meaning if nobody answered.
        loss: weighted mean; NaN if nobody answered.
        payload_bytes: of all updates, as they travelled.
        absences: of this rank's clients.
    """

    change: ModelState
    answered: tuple[int, ...]
    failed: tuple[int, ...]
    loss: float
    payload_bytes: int
    absences: tuple[Absence, ...]


class Combiner:
    """Combines rounds of one federation.

    Args:
        roster: of the federation.
        uplink: how changes travel; None sums whole changes.
        process_set: the ranks that take part.
    """

    def __init__(self, roster: Roster, uplink: Uplink | None, process_set: ProcessSet) -> None:
        self._layout = roster.layout
        self._examples = roster.examples
        self._uplink = uplink
        self._process_set = process_set
        self._scope = group_of(process_set).unnamed("federated", blocking=False)

    def combine(self, chosen: Sequence[int], outcomes: Iterable[Update | Absence]) -> Combined:
        """Combine this rank's outcomes with those of the others.

        Args:
            chosen: clients of the round, the same on every rank.
            outcomes: of this rank's chosen clients.
        """
        total = sum(self._examples[client] for client in chosen)
        shares = {client: self._examples[client] / total for client in chosen}
        if self._uplink is None:
            return self._summed(shares, outcomes)
        return self._gathered(shares, outcomes, self._uplink)

    def _summed(self, shares: dict[int, float], outcomes: Iterable[Update | Absence]) -> Combined:
        size, clients = self._layout.size, list(shares)
        buffer = torch.zeros(size + 3 * len(clients), dtype=self._layout.torch_dtype)
        values, marks = buffer[:size], buffer[size:].view(3, len(clients))
        counters = torch.full((sum(piece.numel for piece in self._layout.counters),), _NO_COUNT)
        absences = []
        for outcome in outcomes:
            place = clients.index(outcome.client)
            if isinstance(outcome, Update):
                values.add_(outcome.change.values, alpha=shares[outcome.client])
                torch.maximum(counters, outcome.change.counters, out=counters)
                marks[0, place], marks[2, place] = 1, outcome.loss
            else:
                absences.append(outcome)
                marks[1, place] = outcome.failed
        allreduce_(buffer, op=Sum, name=f"{self._scope}.changes", process_set=self._process_set)
        if len(counters):
            allreduce_(counters, op=Max, name=f"{self._scope}.counters", process_set=self._process_set)
        answered = _marked(clients, marks[0])
        present = sum(shares[client] for client in answered)
        if answered:
            values /= present
        losses = dict(zip(clients, marks[2].tolist(), strict=True))
        return Combined(
            ModelState(values, counters),
            answered,
            _marked(clients, marks[1]),
            _mean_loss(shares, {client: losses[client] for client in answered}),
            len(answered) * size * values.itemsize,
            tuple(absences),
        )

    def _gathered(
        self, shares: dict[int, float], outcomes: Iterable[Update | Absence], uplink: Uplink
    ) -> Combined:
        absences: list[Absence] = []
        mine = [self._message(outcome, uplink, absences) for outcome in outcomes]
        sent = torch.cat(mine) if mine else torch.empty(0, dtype=torch.uint8)
        gathered = allgather(sent, name=f"{self._scope}.payloads", process_set=self._process_set)
        messages = list(unpack_all(gathered))
        changes = [message for message in messages if isinstance(message.header, Change)]
        changes.sort(key=lambda message: message.address)
        layout = self._layout
        values = torch.zeros(layout.size, dtype=layout.torch_dtype)
        counters = torch.full((sum(piece.numel for piece in layout.counters),), _NO_COUNT)
        present = sum(shares[message.address] for message in changes)
        for message in changes:
            payload, buffers, counts = message.tensors
            share = shares[message.address] / present
            values[: layout.trained].add_(uplink.decode(payload), alpha=share)
            values[layout.trained :].add_(buffers, alpha=share)
            torch.maximum(counters, counts, out=counters)
        return Combined(
            ModelState(values, counters),
            tuple(message.address for message in changes),
            tuple(sorted(_failures(messages))),
            _mean_loss(shares, {message.address: message.header.loss for message in changes}),  # type: ignore[union-attr]
            sum(message.nbytes for message in changes),
            tuple(absences),
        )

    def _message(self, outcome: Update | Absence, uplink: Uplink, absences: list[Absence]) -> Tensor:
        if isinstance(outcome, Update):
            try:
                return pack_change(outcome, uplink, self._layout.trained, address=outcome.client, version=0)
            except Exception as error:  # noqa: BLE001 - the other ranks wait for this one, whatever happened.
                outcome = Absence(outcome.client, f"its update cannot be sent: {error}", failed=True)
        absences.append(outcome)
        return pack(outcome.client, Regret(outcome.client, "", outcome.failed))


def pack_change(update: Update, uplink: Uplink, trained: int, *, address: int, version: int) -> Tensor:
    """The message of an update, with its parameters as the uplink encodes them.

    Args:
        trained: how many of its values are parameters.
        version: of the model that it started from.
    """
    values, counters = update.change
    header = Change(update.client, update.examples, version, update.loss, update.seconds)
    payload = uplink.encode(update.client, values[:trained])
    return pack(address, header, [payload, values[trained:], counters])


def _failures(messages: Sequence[Message]) -> Iterator[int]:
    for message in messages:
        if isinstance(message.header, Regret) and message.header.failed:
            yield message.address


def _marked(clients: Sequence[int], marks: Tensor) -> tuple[int, ...]:
    return tuple(client for client, mark in zip(clients, marks.tolist(), strict=True) if mark)


def _mean_loss(shares: dict[int, float], losses: dict[int, float]) -> float:
    present = sum(shares[client] for client in losses)
    return sum(shares[client] * loss for client, loss in losses.items()) / present if losses else float("nan")
