"""One client of an asynchronous server, on a thread of its own.

Waits for a model, trains, answers, until it is told to stop; a stop that comes while it
trains ends the training at the next batch. It answers everything, also a failure, and
always says goodbye, so the server need not guess. Its last word cannot be lost: whatever
its code raises is caught here.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from torch import Tensor

from coordinator.errors import FusionError
from fusion.federated.clients import Client
from fusion.federated.combining import pack_change
from fusion.federated.link import Link
from fusion.federated.messages import Goodbye, Message, Regret, Stop, Work, pack
from fusion.federated.uplink import Uplink
from fusion.federated.vector import Layout, ModelState
from fusion.federated.workbench import Absence, Update, Workbench

SERVER = 0
"""Its rank; the address there is 0 as well, and those of clients are their numbers plus 1."""

_CHECK_EVERY_S = 0.05


class Inbox:
    """What has arrived for one thread. `put` on any thread, `get` on that one."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._checked = time.monotonic()
        self._queue: queue.Queue[Message] = queue.Queue()
        self.put = self._queue.put

    def get(self, timeout: float | None = None) -> Message | None:
        """Wait for a message; None when the time, in seconds, is up.

        Raises:
            FusionError: what `check` raises, once nothing can arrive any more.
        """
        left = float("inf") if timeout is None else timeout
        while True:
            # Looked at also while messages keep coming: some ranks may go on when one has left.
            if time.monotonic() - self._checked > _CHECK_EVERY_S:
                self._check()
                self._checked = time.monotonic()
            try:
                return self._queue.get(timeout=max(0.0, min(left, _CHECK_EVERY_S)))
            except queue.Empty:
                left -= _CHECK_EVERY_S
                if left <= 0:
                    return None


class AsyncClient:
    """Runs a client.

    Args:
        client: whose data it is.
        bench: where it trains, nobody else's.
        layout: of the model.
        link: to the server.
        uplink: how changes travel.
    """

    def __init__(self, client: Client, bench: Workbench, layout: Layout, link: Link, uplink: Uplink) -> None:
        self.client = client
        self._bench, self._trained, self._link, self._uplink = bench, layout.trained, link, uplink
        self._inbox = Inbox(link.check)
        self._stop = threading.Event()
        self._stopped_at: float | None = None
        link.register(client.number + 1, self._deliver)
        self._thread = threading.Thread(target=self._run, name=f"fusion-client-{client.number}", daemon=True)

    def start(self) -> None:
        """Start its thread."""
        self._thread.start()

    def stop(self) -> None:
        """End its training at the next batch, when the server cannot say so any more."""
        self._stop.set()

    def join(self, timeout: float) -> bool:
        """Whether it has ended within so many seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def overdue(self, timeout: float) -> bool:
        """Whether it was told to stop longer than `timeout` seconds ago."""
        return self._stopped_at is not None and time.monotonic() - self._stopped_at > timeout

    def _deliver(self, message: Message) -> None:
        if isinstance(message.header, Stop):
            self._stopped_at = time.monotonic()
            self._stop.set()
        self._inbox.put(message)

    def _run(self) -> None:
        try:
            while True:
                message = self._inbox.get()
                if message is not None and isinstance(message.header, Work):
                    self._work(message.header, ModelState(*message.tensors))
                elif message is not None and isinstance(message.header, Stop):
                    self._uplink.settle(self.client.number, used=message.header.accepted)
                    break
            self._link.send(SERVER, pack(SERVER, Goodbye(self.client.number)))
        except FusionError:
            return  # Nobody is left to talk to; the rank's main thread sees the same error.

    def _work(self, work: Work, start: ModelState) -> None:
        number = self.client.number
        try:
            self._uplink.settle(number, used=work.accepted)
            outcome = self._bench.train(self.client, start, work.turn, self._stop)
            if self._stop.is_set():
                return
            answer = self._answer(outcome, work.version)
        except BaseException as error:  # noqa: BLE001 - the server waits for an answer, even if code exits.
            answer = pack(SERVER, Regret(number, f"it raised {type(error).__name__}: {error}", failed=True))
        self._link.send(SERVER, answer)

    def _answer(self, outcome: Update | Absence, version: int) -> Tensor:
        if isinstance(outcome, Update):
            return pack_change(outcome, self._uplink, self._trained, address=SERVER, version=version)
        return pack(SERVER, Regret(outcome.client, outcome.reason, outcome.failed))
