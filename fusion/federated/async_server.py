"""The decisions of an asynchronous server: who works next, and what becomes of an update.

No message, no clock, no thread: `asynchronous.py` moves what is decided here. Called
on the server's thread.

Guarantees: a client never waits for another one, unless `concurrency` is lower than
the number of clients; then the one that has waited longest is next. An update staler
than `max_staleness` is rejected, which costs its client's work and nobody's time; the
client goes on from the newest model.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

from fusion.federated.async_rules import AsyncRule
from fusion.federated.messages import Work
from fusion.federated.vector import ModelState


class Assignment(Struct, frozen=True):
    """Work for a client, and the model that goes with it."""

    client: int
    work: Work
    state: ModelState


class Tally(Struct):
    """What has happened to updates so far.

    Attributes:
        used, rejected: updates by client.
        dropped: how often each client dropped out.
        failed: why clients were left out for good, if failures do not end the run.
        staleness: how many used updates had each staleness.
        rejected_staleness: the same of rejected ones.
    """

    used: Counter[int]
    rejected: Counter[int]
    dropped: Counter[int]
    failed: dict[int, str]
    staleness: Counter[int]
    rejected_staleness: Counter[int]

    @classmethod
    def empty(cls) -> Tally:
        """Nothing has happened."""
        return cls(Counter(), Counter(), Counter(), {}, Counter(), Counter())


class AsyncServer:
    """The state of the server.

    Args:
        state: the model to begin with; not changed.
        trained: how many of its values are parameters.
        clients: those that have data.
        rule: what is made of an update.
        max_staleness: of an update that is used; None for any.
        concurrency: clients that work at the same time; None for all.
        turns: how often each client has been given work in earlier runs; counted on.

    Attributes:
        state: the newest model.
        version: its number, from 0.
        tally: see `Tally`.
    """

    def __init__(
        self,
        state: ModelState,
        trained: int,
        clients: Iterable[int],
        rule: AsyncRule,
        *,
        max_staleness: int | None = None,
        concurrency: int | None = None,
        turns: Counter[int] | None = None,
    ) -> None:
        self.state, self.version = state, 0
        self.tally = Tally.empty()
        self._trained, self._rule = trained, rule
        self._max_staleness, self._concurrency = max_staleness, concurrency
        self._idle = deque(clients)
        self._working: dict[int, tuple[int, ModelState]] = {}
        self._turns: Counter[int] = Counter() if turns is None else turns
        self._accepted: dict[int, bool] = {}

    @property
    def clients_left(self) -> bool:
        """Whether anybody works or could."""
        return bool(self._idle or self._working)

    def assign(self) -> list[Assignment]:
        """Work for whoever is free."""
        assignments = []
        while self._idle and (self._concurrency is None or len(self._working) < self._concurrency):
            client = self._idle.popleft()
            self._working[client] = self.version, self.state
            work = Work(self.version, self._turns[client], self.accepted(client))
            self._turns[client] += 1
            assignments.append(Assignment(client, work, self.state))
        return assignments

    def accepted(self, client: int) -> bool:
        """Whether the client's last update was used, if it has not been told yet."""
        return self._accepted.pop(client, False)

    def take(self, client: int, change: ModelState) -> Literal["new model", "buffered", "rejected"]:
        """Take a client's update, which frees the client."""
        version, base = self._working.pop(client)
        self._idle.append(client)
        staleness = self.version - version
        if self._max_staleness is not None and staleness > self._max_staleness:
            self.tally.rejected[client] += 1
            self.tally.rejected_staleness[staleness] += 1
            return "rejected"
        self._accepted[client] = True
        self.tally.used[client] += 1
        self.tally.staleness[staleness] += 1
        state = self._rule.absorb(self.state, base, change, staleness, self._trained)
        if state is None:
            return "buffered"
        self.state, self.version = state, self.version + 1
        return "new model"

    def dropped(self, client: int) -> None:
        """A client has dropped out of this turn; it is free again."""
        del self._working[client]
        self._idle.append(client)
        self.tally.dropped[client] += 1

    def failed(self, client: int, reason: str) -> None:
        """A client takes no further part."""
        del self._working[client]
        self.tally.failed[client] = reason
