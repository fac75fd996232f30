"""Federated averaging in rounds: every chosen client trains, then all ranks combine at once.

Every rank calls `FederatedAveraging.round`, on the thread that trains. A round is
one all-reduce of one flat vector: the weighted changes of this rank's clients, and
behind them who has answered. With compression it is one all-gather of the clients'
payloads. All ranks end with the same bits. McMahan et al., "Communication-efficient
learning of deep networks from decentralized data", AISTATS 2017.

Cost of a round, for a model of n bytes, C chosen clients, payloads of p bytes:
one all-reduce of n + 12 C bytes, or one all-gather of C p bytes; and a second
all-reduce of 8 bytes for each whole-number buffer, if the model has any.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, Literal

from msgspec import Struct
from torch import nn

from coordinator.errors import ClientError
from fusion.compression import Compressor
from fusion.federated.clients import Client
from fusion.federated.combining import Combined, Combiner
from fusion.federated.roster import Roster, enrol
from fusion.federated.sampling import check_fraction, choose_clients
from fusion.federated.server_optimizers import FedAvg, ServerOptimizer
from fusion.federated.training import LocalTraining
from fusion.federated.uplink import Uplink, compressor_of
from fusion.federated.vector import ModelState
from fusion.federated.workbench import Absence, Update, Workbench
from fusion.torch.objects import allgather_object
from fusion.torch.process_sets import ProcessSet, global_process_set

logger = logging.getLogger("fusion")


class RoundReport(Struct, frozen=True):
    """What happened in a round; the same on every rank.

    Attributes:
        number: of the round, from 0.
        chosen: clients that were to train.
        answered: those whose update was used.
        dropped: those that dropped out.
        failed: those whose code raised, with `on_failure="drop"`.
        examples: of those that answered.
        loss: their mean training loss, weighted by examples; NaN if nobody answered.
        applied: whether the model has changed; not if fewer than `least_clients` answered.
        payload_bytes: of all updates together, as they travelled.
    """

    number: int
    chosen: tuple[int, ...]
    answered: tuple[int, ...]
    dropped: tuple[int, ...]
    failed: tuple[int, ...]
    examples: int
    loss: float
    applied: bool
    payload_bytes: int


class FederatedAveraging:
    """FedAvg and its relatives over all ranks. Making one is collective.

    Args:
        model: the global model, of the same structure on every rank; takes the first rank's values, and
            is overwritten after every round.
        clients: that this rank hosts: one, many or none. Clients without data are never chosen.
        training: what a client does; its `proximal` makes it FedProx.
        server: what is made of the average change; default `FedAvg()`.
        fraction: share of the clients with data that trains in a round.
        seed: of sampling, shuffling and dropout; the same on every rank.
        compression: how changes of parameters travel, see `fusion.federated.uplink`; what it leaves
            out is kept for each client and added to its next change. Buffers travel whole.
        personal: patterns of names that every client keeps for itself (FedBN: the normalization layers).
        on_failure: "raise" a `ClientError` on every rank when a client's code raises or its update
            is not finite; or "drop" it from this round.
        least_clients: with fewer answers the round changes nothing.
        threads: clients of this rank that train at the same time. With more than 1, torch's global
            random numbers (dropout layers) do not repeat from run to run.
        process_set: the ranks that take part.

    Attributes:
        model: as given.
        examples: of every client of all ranks.

    Raises:
        MismatchError: the models or settings differ between ranks; on every rank.
        ValueError: an argument out of range, a client number used twice, no data at all.
    """

    def __init__(
        self,
        model: nn.Module,
        clients: Sequence[Client],
        training: LocalTraining,
        *,
        server: ServerOptimizer | None = None,
        fraction: float = 1.0,
        seed: int = 0,
        compression: Compressor | str | None = None,
        personal: Sequence[str] = (),
        on_failure: Literal["raise", "drop"] = "raise",
        least_clients: int = 1,
        threads: int = 1,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        check_fraction(fraction)
        _check(on_failure, least_clients, threads)
        self.model = model
        self._clients = {client.number: client for client in clients}
        settings = {
            "fraction": fraction,
            "seed": seed,
            "compression": compressor_of(compression),
            "on_failure": on_failure,
            "least_clients": least_clients,
            "server": type(server),
        }
        self._roster = enrol(model, clients, personal, settings, process_set)
        self.examples = self._roster.examples
        self._server: ServerOptimizer = FedAvg() if server is None else server
        self._fraction, self._seed = fraction, seed
        self._on_failure, self._least = on_failure, least_clients
        self._uplink = _uplink(self._roster, compression, seed, self._clients)
        self._combiner = Combiner(self._roster, self._uplink, process_set)
        self._process_set = process_set
        self._number = 0
        layout = self._roster.layout
        self._state = layout.read(model)
        self._benches: SimpleQueue[Workbench] = SimpleQueue()
        self._threads = threads
        for _ in range(threads):
            self._benches.put(Workbench(model, layout, training, seed=seed, reseed=threads == 1))

    def round(self) -> RoundReport:
        """Run the next round.

        Raises:
            ClientError: a client failed, and `on_failure` is "raise"; on every rank, with the model
                as it was before. The next call is the next round.
        """
        number, self._number = self._number, self._number + 1
        chosen = choose_clients(self.examples, self._fraction, seed=self._seed, round_number=number)
        mine = [self._clients[client] for client in chosen if client in self._clients]
        combined = self._combiner.combine(chosen, self._outcomes(mine, number))
        if combined.failed and self._on_failure == "raise":
            self._settle(combined, used=False)
            raise ClientError(self._failures(number, combined))
        self._tell(number, combined)
        applied = len(combined.answered) >= self._least
        self._settle(combined, used=applied)
        if applied:
            self._apply(combined)
        else:
            logger.warning(
                "round %d changed nothing: %d of %d clients answered",
                number,
                len(combined.answered),
                len(chosen),
            )
        return _report(number, chosen, combined, applied, self.examples)

    def _outcomes(self, clients: list[Client], number: int) -> Iterator[Update | Absence]:
        """Train clients; outcomes in the order of the clients, whatever finishes first."""
        if self._threads == 1:
            yield from (self._train(client, number) for client in clients)
            return
        with ThreadPoolExecutor(self._threads, thread_name_prefix="fusion-client") as pool:
            yield from pool.map(lambda client: self._train(client, number), clients)

    def _train(self, client: Client, number: int) -> Update | Absence:
        bench = self._benches.get()
        try:
            return bench.train(client, self._state, number)
        finally:
            self._benches.put(bench)

    def _apply(self, combined: Combined) -> None:
        layout = self._roster.layout
        state = self._state.clone()
        self._server.step(state.values[: layout.trained], combined.change.values[: layout.trained])
        # A server optimizer is for what is trained; it could make a variance negative.
        state.values[layout.trained :] += combined.change.values[layout.trained :]
        self._state = ModelState(state.values, combined.change.counters)
        layout.write(self.model, self._state)

    def _settle(self, combined: Combined, *, used: bool) -> None:
        if self._uplink is not None:
            for client in combined.answered:
                self._uplink.settle(client, used=used)

    def _failures(self, number: int, combined: Combined) -> str:
        told = allgather_object(
            [absence for absence in combined.absences if absence.failed], process_set=self._process_set
        )
        reasons = "; ".join(
            f"{self._roster.name(absence.client)}: {absence.reason}" for its in told for absence in its
        )
        return (
            f"round {number} failed and changed nothing ({reasons}). Mend the client, or leave such "
            'clients out with on_failure="drop"'
        )

    def _tell(self, number: int, combined: Combined) -> None:
        for absence in combined.absences:
            log = logger.warning if absence.failed else logger.info
            log("round %d goes on without %s: %s", number, self._roster.name(absence.client), absence.reason)

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to go on later: the model, the server optimizer, what compression of
        this rank's clients has left out so far, and their personal layers."""
        return {
            "round": self._number,
            "values": self._state.values.clone(),
            "counters": self._state.counters.clone(),
            "server": self._server.state_dict(),
            "uplinks": {} if self._uplink is None else self._uplink.state_dict(),
            "personal": {number: dict(client.personal) for number, client in self._clients.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that this rank had; every rank must do so.

        Raises:
            ValueError: it is of another model or another kind of server optimizer.
        """
        values, counters = state["values"], state["counters"]
        if values.shape != self._state.values.shape or counters.shape != self._state.counters.shape:
            raise ValueError(
                f"this state is of a model of {values.numel()} values, but the model has "
                f"{self._state.values.numel()}: build the model that it was saved with"
            )
        self._server.load_state_dict(state["server"])
        if self._uplink is not None:
            self._uplink.load_state_dict(state["uplinks"])
        for number, personal in state["personal"].items():
            if number in self._clients:
                self._clients[number].personal = dict(personal)
        self._number = state["round"]
        self._state = ModelState(values.clone(), counters.clone())
        self._roster.layout.write(self.model, self._state)


def _check(on_failure: str, least_clients: int, threads: int) -> None:
    if on_failure not in ("raise", "drop"):
        raise ValueError(f'on_failure must be "raise" or "drop"; got {on_failure!r}')
    if least_clients < 1 or threads < 1:
        raise ValueError(f"least_clients and threads must be 1 or more; got {least_clients} and {threads}")


def _uplink(
    roster: Roster, compression: Compressor | str | None, seed: int, clients: Iterable[int]
) -> Uplink | None:
    compressor = compressor_of(compression)
    if compressor is None:
        return None
    uplink = Uplink(roster.layout, compressor, seed)
    for client in clients:
        uplink.add_client(client)
    return uplink


def _report(
    number: int, chosen: tuple[int, ...], combined: Combined, applied: bool, examples: dict[int, int]
) -> RoundReport:
    present = {*combined.answered, *combined.failed}
    return RoundReport(
        number=number,
        chosen=chosen,
        answered=combined.answered,
        dropped=tuple(client for client in chosen if client not in present),
        failed=combined.failed,
        examples=sum(examples[client] for client in combined.answered),
        loss=combined.loss,
        applied=applied,
        payload_bytes=combined.payload_bytes,
    )
