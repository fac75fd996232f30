"""The server's loop: messages in, decisions by `AsyncServer`, messages out.

Runs on the thread of rank 0 that called `AsyncFederation.run`. However it ends, every
client has been told to stop and has said goodbye, or its time to do so is up, so no
message is left under way.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from msgspec import Struct
from torch import nn

from coordinator.errors import ClientError, FusionError
from fusion.federated.async_client import Inbox
from fusion.federated.async_server import AsyncServer
from fusion.federated.link import Link
from fusion.federated.messages import Change, Goodbye, Message, Regret, Stop, pack
from fusion.federated.roster import Roster
from fusion.federated.uplink import Uplink
from fusion.federated.vector import ModelState

_MOST_IN_VAIN = 100
"""Turns of each client that may come to nothing, with no update between, before the run is given up."""


class Progress(Struct, frozen=True):
    """How far a run has come.

    Attributes:
        version: models made so far.
        updates: used so far.
        seconds: since the first model was sent.
    """

    version: int
    updates: int
    seconds: float


Watch = Callable[[nn.Module, Progress], bool | None]


class Limits(Struct, frozen=True):
    """When a run ends; see `AsyncFederation.run`.

    Raises:
        ValueError: there is none, or one out of range.
    """

    versions: int | None
    seconds: float | None
    watch: Watch | None
    watch_every: int

    def __post_init__(self) -> None:
        if self.versions is None and self.seconds is None and self.watch is None:
            raise ValueError("a run needs an end: give versions, seconds, or a watch that returns True")
        if self.versions is not None and self.versions < 1:
            raise ValueError(f"versions must be 1 or more; got {self.versions}")
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"seconds must be above 0; got {self.seconds}")
        if self.watch_every < 1:
            raise ValueError(f"watch_every must be 1 or more; got {self.watch_every}")


class Policy(Struct, frozen=True):
    """What becomes of clients that fail; see `AsyncFederation`."""

    drop_failed: bool
    stop_timeout_s: float


class _Halt(Exception):  # noqa: N818, it carries the error
    """The run ends with an error that all ranks are told."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Serving:
    """One run of the server.

    Args:
        model: shown to `watch`; left as it was if the run ends with an error.
        roster: of the federation.
        server: decides.
        link: to the clients; not started yet.
        uplink: decodes their changes.
        limits: when to end.
        policy: what becomes of clients that fail.

    Attributes:
        server: as given.
        seconds: from the first model sent to the last update used.
        update_bytes: of all updates that came.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        roster: Roster,
        server: AsyncServer,
        link: Link,
        uplink: Uplink,
        limits: Limits,
        policy: Policy,
    ) -> None:
        self._model, self._roster, self._link, self._uplink = model, roster, link, uplink
        self.server = server
        self._limits, self._policy = limits, policy
        self._inbox = Inbox(link.check)
        self._clients = [client for client, examples in roster.examples.items() if examples]
        self._told_to_end = False
        self._in_vain = 0
        self._began = 0.0
        self.seconds = 0.0
        self.update_bytes = 0
        link.register(0, self._inbox.put)

    def run(self) -> Exception | None:
        """Serve until a limit is reached; the error that all ranks must be told, if any.

        Raises:
            FusionError: a rank has left, or the link has failed.
        """
        start = self.server.state
        failure = None
        self._began = time.monotonic()
        try:
            while not self._reached():
                self._assign()
                message = self._inbox.get(self._left())
                if message is not None:
                    self._handle(message)
        except _Halt as halt:
            failure = halt.error
            self._roster.layout.write(self._model, start)
        self._stop_clients()
        return failure

    def _reached(self) -> bool:
        left = self._left()
        enough = self._limits.versions is not None and self.server.version >= self._limits.versions
        return self._told_to_end or enough or (left is not None and left <= 0)

    def _left(self) -> float | None:
        """Seconds until the time is up."""
        if self._limits.seconds is None:
            return None
        return self._began + self._limits.seconds - time.monotonic()

    def _assign(self) -> None:
        for assignment in self.server.assign():
            message = pack(assignment.client + 1, assignment.work, assignment.state)
            self._link.send(self._roster.ranks[assignment.client], message)

    def _handle(self, message: Message) -> None:
        header = message.header
        if isinstance(header, Change):
            self._absorb(header, message)
        elif isinstance(header, Regret):
            self._in_vain += 1
            self._miss(header)
        if self._in_vain > _MOST_IN_VAIN * len(self._clients):
            raise _Halt(FusionError(f"no update in {self._in_vain} turns of the clients: they all drop out"))

    def _absorb(self, header: Change, message: Message) -> None:
        payload, buffers, counters = message.tensors
        self.update_bytes += message.nbytes
        values = torch.cat([self._uplink.decode(payload), buffers])
        try:
            verdict = self.server.take(header.client, ModelState(values, counters))
        except Exception as error:
            raise _Halt(error) from error
        if verdict == "rejected":
            return
        self._in_vain = 0
        self.seconds = time.monotonic() - self._began
        if verdict == "new model" and self.server.version % self._limits.watch_every == 0:
            self._watch()

    def _watch(self) -> None:
        if self._limits.watch is None:
            return
        self._roster.layout.write(self._model, self.server.state)
        training = self._model.training
        self._model.eval()
        updates = sum(self.server.tally.used.values())
        try:
            answer = self._limits.watch(self._model, Progress(self.server.version, updates, self.seconds))
        except Exception as error:
            raise _Halt(error) from error
        finally:
            self._model.train(training)
        self._told_to_end = bool(answer)

    def _miss(self, regret: Regret) -> None:
        if not regret.failed:
            self.server.dropped(regret.client)
            return
        self.server.failed(regret.client, regret.reason)
        who = f"{self._roster.name(regret.client)}: {regret.reason}"
        if not self._policy.drop_failed:
            raise _Halt(
                ClientError(
                    f"the run ended because a client failed ({who}). Mend it, or leave such clients out with "
                    'on_failure="drop"'
                )
            )
        if not self.server.clients_left:
            raise _Halt(ClientError(f"no client is left: all have failed, the last one was {who}"))

    def _stop_clients(self) -> None:
        """Stop all clients and wait for their goodbyes, which are the last messages."""
        for client in self._clients:
            stop = Stop(self.server.accepted(client))
            self._link.send(self._roster.ranks[client], pack(client + 1, stop))
        missing = set(self._clients)
        end = time.monotonic() + self._policy.stop_timeout_s
        while missing and time.monotonic() < end:
            message = self._inbox.get(end - time.monotonic())
            if message is not None and isinstance(message.header, Goodbye):
                missing.discard(message.header.client)
