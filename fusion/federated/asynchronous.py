"""Asynchronous federated training: a server uses each update as soon as it comes.

Rank 0 is the server, on the thread that calls `run`; it may host clients as well. Every
client has a thread of its own on the rank that hosts it, so none waits for another. Each
rank's messages go through one `Link`, on a communicator of its own, beside the runtime.
Collective: every rank makes the `AsyncFederation` and calls `run`.

Cost of an update: one message of the model to the client, and one back with the change,
compressed if asked for. Memory of the server: its model, and the models that clients
are still at work on, which share what is the same version.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import Struct
from torch import nn

from coordinator.errors import ClientError, FusionError
from fusion import runtime
from fusion.compression import Compressor
from fusion.federated.async_client import SERVER, AsyncClient
from fusion.federated.async_rules import AsyncRule, FedAsync
from fusion.federated.async_server import AsyncServer
from fusion.federated.clients import Client
from fusion.federated.link import Link
from fusion.federated.roster import enrol
from fusion.federated.serving import Limits, Policy, Serving, Watch
from fusion.federated.training import LocalTraining
from fusion.federated.uplink import Uplink, compressor_of
from fusion.federated.workbench import Workbench
from fusion.torch.functions import broadcast_parameters
from fusion.torch.objects import allgather_object, broadcast_object

_CHECK_EVERY_S = 0.05


class AsyncReport(Struct, frozen=True):
    """What happened in a run; the same on every rank, but for the bytes.

    Attributes:
        versions: models that the server has made.
        seconds: from the first model sent to the last update used.
        updates, rejected, dropped: numbers by client.
        failed: reasons by client, with `on_failure="drop"`.
        staleness: how many used updates had each staleness.
        rejected_staleness: how many rejected ones had.
        update_bytes: of all updates together, as they travelled.
        sent_bytes, received_bytes: of this rank, over MPI.
    """

    versions: int
    seconds: float
    updates: dict[int, int]
    rejected: dict[int, int]
    dropped: dict[int, int]
    failed: dict[int, str]
    staleness: dict[int, int]
    rejected_staleness: dict[int, int]
    update_bytes: int
    sent_bytes: int = 0
    received_bytes: int = 0

    @property
    def max_staleness(self) -> int:
        """Largest staleness of an update that was used."""
        return max(self.staleness, default=0)

    @property
    def mean_staleness(self) -> float:
        """Mean staleness of the updates that were used."""
        count = sum(self.staleness.values())
        return sum(age * times for age, times in self.staleness.items()) / count if count else 0.0


class AsyncFederation:
    """FedAsync and FedBuff over all ranks. Making one is collective.

    Args:
        model: the global model, of the same structure on every rank; takes rank 0's values, and is
            overwritten when a run has ended.
        clients: that this rank hosts: one, many or none. Clients without data get no work.
        training: what a client does; its `proximal` is FedAsync's rho.
        rule: `FedAsync()` (the default) or `FedBuff()`.
        max_staleness: an update that is staler is rejected: not used, and counted in the report.
            What compression had left out before is kept. None uses all.
        concurrency: clients that work at the same time, the paper's M_c of FedBuff; None for all.
        seed: of shuffling and dropout.
        compression: how changes of parameters travel, with a memory for each client; see
            `fusion.federated.uplink`.
        personal: patterns of names that every client keeps for itself.
        on_failure: "raise" a `ClientError` on every rank when a client's code raises or its update is
            not finite; or "drop" that client for the rest of the run.
        stop_timeout_s: how long a client may take to end once it is told to; it looks after each
            batch. Later, `ClientError`.

    Raises:
        MismatchError: the models or settings differ between ranks; on every rank.
        ValueError: an argument out of range, a client number used twice, no data at all.
        FusionError: MPI was started without MPI_THREAD_MULTIPLE.
    """

    def __init__(
        self,
        model: nn.Module,
        clients: Sequence[Client],
        training: LocalTraining,
        *,
        rule: AsyncRule | None = None,
        max_staleness: int | None = None,
        concurrency: int | None = None,
        seed: int = 0,
        compression: Compressor | str | None = None,
        personal: Sequence[str] = (),
        on_failure: Literal["raise", "drop"] = "raise",
        stop_timeout_s: float = 60.0,
    ) -> None:
        _check(max_staleness, concurrency, on_failure, stop_timeout_s)
        runtime.require_multiple_threads("asynchronous federated training")
        self.model = model
        self._clients = list(clients)
        self._training = training
        self._rule: AsyncRule = FedAsync() if rule is None else rule
        self._max_staleness, self._concurrency = max_staleness, concurrency
        self._seed, self._on_failure, self._stop_timeout_s = seed, on_failure, stop_timeout_s
        self._roster = enrol(
            model, clients, personal, {"seed": seed, "compression": compressor_of(compression)}
        )
        self._turns: Counter[int] = Counter()
        self._uplink = Uplink(self._roster.layout, compression, seed)
        for client in clients:
            self._uplink.add_client(client.number)

    def run(
        self,
        *,
        versions: int | None = None,
        seconds: float | None = None,
        watch: Watch | None = None,
        watch_every: int = 1,
    ) -> AsyncReport:
        """Train until a limit is reached; every rank gives the same limits.

        Args:
            versions: new models that the server makes.
            seconds: looked at after each update.
            watch: called on rank 0 with the global model in `self.model`, in evaluation mode, after
                every `watch_every`-th new model; True ends the run. Updates wait meanwhile.

        Raises:
            ClientError: a client failed or does not stop; on every rank, and the model stays as it was.
            FusionError: `watch` raised; on the other ranks. Rank 0 raises its exception itself.
            RankLeftError: a rank has left the job.
            ValueError: no limit, or one out of range.
        """
        limits = Limits(versions, seconds, watch, watch_every)
        current = runtime.current()
        link = Link(current.comm, lambda: current.world.coordinator.end)
        clients = self._hosted(link)
        serving = self._serving(link, limits) if current.topology.rank == SERVER else None
        try:
            link.start()
            for client in clients:
                client.start()
            failure = None if serving is None else serving.run()
            stuck = self._await(clients, link)
            told = allgather_object((_described(failure), stuck))
        except BaseException:
            # A rank has left, or this one was interrupted: there is nobody to agree with.
            for client in clients:
                client.stop()
            link.abandon()
            raise
        link.close()
        self._raise(failure, told)
        return self._finish(serving, link)

    def _hosted(self, link: Link) -> list[AsyncClient]:
        layout = self._roster.layout
        return [
            AsyncClient(
                client,
                Workbench(self.model, layout, self._training, seed=self._seed, reseed=False),
                layout,
                link,
                self._uplink,
            )
            for client in self._clients
            if client.examples
        ]

    def _serving(self, link: Link, limits: Limits) -> Serving:
        layout = self._roster.layout
        server = AsyncServer(
            layout.read(self.model),
            layout.trained,
            [client for client, examples in self._roster.examples.items() if examples],
            self._rule,
            max_staleness=self._max_staleness,
            concurrency=self._concurrency,
            turns=self._turns,
        )
        policy = Policy(drop_failed=self._on_failure == "drop", stop_timeout_s=self._stop_timeout_s)
        return Serving(
            model=self.model,
            roster=self._roster,
            server=server,
            link=link,
            uplink=self._uplink,
            limits=limits,
            policy=policy,
        )

    def _await(self, clients: list[AsyncClient], link: Link) -> list[int]:
        """Wait until the server has stopped this rank's clients; those that do not stop."""
        stuck = []
        for client in clients:
            while not client.join(_CHECK_EVERY_S):
                link.check()
                if client.overdue(self._stop_timeout_s):
                    stuck.append(client.client.number)
                    break
        link.check()  # Clients end by themselves when nobody is left to talk to.
        return stuck

    def _raise(self, failure: Exception | None, told: list[tuple[_Described | None, list[int]]]) -> None:
        """What every rank raises, if anybody has something to raise."""
        if failure is not None:
            raise failure
        described = told[SERVER][0]
        if described is not None:
            raise ClientError(described.text) if described.by_client else FusionError(described.text)
        stuck = [self._roster.name(client) for _, its in told for client in its]
        if stuck:
            raise ClientError(
                f"{', '.join(stuck)} did not stop within {self._stop_timeout_s:g} s of the end of the run: "
                "its loss or its data does not return"
            )

    def _finish(self, serving: Serving | None, link: Link) -> AsyncReport:
        """Give every rank the final model and the report."""
        if serving is not None:
            self._roster.layout.write(self.model, serving.server.state)
        broadcast_parameters(self.model.state_dict(), root_rank=SERVER)
        report = None if serving is None else _report(serving)
        agreed: AsyncReport = broadcast_object(report, SERVER)
        return msgspec.structs.replace(agreed, sent_bytes=link.sent_bytes, received_bytes=link.received_bytes)


class _Described(Struct, frozen=True):
    """Why the server ended, for ranks that do not have its exception."""

    text: str
    by_client: bool


def _described(failure: Exception | None) -> _Described | None:
    if failure is None:
        return None
    if isinstance(failure, ClientError):
        return _Described(str(failure), by_client=True)
    return _Described(
        f"the run ended because the server on rank {SERVER} raised {type(failure).__name__}: {failure}",
        by_client=False,
    )


def _report(serving: Serving) -> AsyncReport:
    tally = serving.server.tally
    return AsyncReport(
        versions=serving.server.version,
        seconds=serving.seconds,
        updates=dict(sorted(tally.used.items())),
        rejected=dict(sorted(tally.rejected.items())),
        dropped=dict(sorted(tally.dropped.items())),
        failed=dict(sorted(tally.failed.items())),
        staleness=dict(sorted(tally.staleness.items())),
        rejected_staleness=dict(sorted(tally.rejected_staleness.items())),
        update_bytes=serving.update_bytes,
    )


def _check(
    max_staleness: int | None, concurrency: int | None, on_failure: str, stop_timeout_s: float
) -> None:
    if max_staleness is not None and max_staleness < 0:
        raise ValueError(f"max_staleness must be 0 or more, or None; got {max_staleness}")
    if concurrency is not None and concurrency < 1:
        raise ValueError(f"concurrency must be 1 or more, or None for all clients; got {concurrency}")
    if on_failure not in ("raise", "drop"):
        raise ValueError(f'on_failure must be "raise" or "drop"; got {on_failure!r}')
    if not stop_timeout_s > 0:
        raise ValueError(f"stop_timeout_s must be above 0; got {stop_timeout_s}")
