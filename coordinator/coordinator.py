"""The coordinator of one rank: its tensor table and the thread that serves it.

User threads call `submit`, `leave` and read `ended`; everything else runs on
the cycle thread, which alone touches MPI and the executor. One turn of it:
gather submissions, negotiate, plan, execute, complete.

Guarantees: every handle completes. It gets its output, or the error of its own
request, or what ended the runtime: a rank that left (`RankLeftError`), a stall
(`StallError`), this rank's own `leave` (`ShutdownError`), or an exception of the
cycle thread (`RuntimeBrokenError`, with the exception as its cause). Later
submissions fail at once with the same error.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import cast

import msgspec

from coordinator import pace
from coordinator.doorbell import Doorbell
from coordinator.errors import (
    FusionError,
    MismatchError,
    RankLeftError,
    RuntimeBrokenError,
    ShutdownError,
)
from coordinator.executor import Entry, Executor, Work, last_parts
from coordinator.handle import Bell, Handle, complete_all
from coordinator.messages import OpKind, Request, Response
from coordinator.negotiation import Flag, Negotiator
from coordinator.planner import PlanCache
from coordinator.recorder import Recorder
from coordinator.refusal import departure, refusal
from coordinator.reports import merge
from coordinator.settings import Settings
from coordinator.stall import StallWatch
from coordinator.table import TensorTable
from coordinator.tuning import Knobs, Tuning
from coordinator.under_way import LONGEST_NAP_S, UnderWay
from coordinator.waiting import CHECK_EVERY_S, Spin, patience, wake_on_time
from coordinator.wire import Wire

logger = logging.getLogger("fusion")


JOIN = Request("join", OpKind.JOIN, ("int64",), ((),))
"""What `join` submits; its result is the rank that joined last."""


class Coordinator:
    """Owns the cycle thread of one process set on one rank.

    Args:
        wire: connects it to the coordinators of the other ranks.
        executor: runs what was agreed.
        settings: see `Settings`.
        recorder: told what happens and how long it takes.
        tuning: changes settings while it runs; on all ranks or on none.
        clock: seconds that never go back.
        name: of the thread.

    Attributes:
        submit: queues an entry, on any thread; its handle completes later. Raises
            `DuplicateNameError` if its name is in flight on this rank, and what
            ended the runtime (a `FusionError`) if it has ended.
    """

    def __init__(
        self,
        wire: Wire,
        executor: Executor,
        settings: Settings,
        recorder: Recorder,
        *,
        tuning: Tuning | None = None,
        clock: Callable[[], float] = time.monotonic,
        name: str = "fusion-cycle",
    ) -> None:
        self._wire = wire
        self._executor = executor
        self._settings = settings
        self._recorder = recorder
        self.tuning = tuning
        self._clock = clock
        self._doorbell = Doorbell()
        self._table = TensorTable(self._doorbell, settings.fusion_threshold)
        self.bell = Bell(self._table.urge)
        self._negotiator = Negotiator(wire.rank, wire.size, settings.cache_capacity, wire.ranks)
        self._stall = StallWatch(settings.stall_warning_s, settings.stall_shutdown_s, wire.ranks)
        self._under_way = UnderWay(settings.stall_warning_s, settings.stall_shutdown_s)
        self._plans = PlanCache(self._negotiator.registry, settings.fusion_threshold)
        self._leaving: str | None = None
        self._progressed_at = clock()
        self._spin = Spin(clock)
        self._ended = threading.Event()
        self._broken = False
        self.end: FusionError | None = None
        """What ended the runtime, once `ended` is set."""
        self.submit = self._table.add
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the cycle thread."""
        self._thread.start()

    def in_flight(self, name: str) -> bool:
        """Whether an operation of that name is pending on this rank."""
        return self._table.get(name) is not None

    def leave(self, reason: str, timeout: float | None = None) -> bool:
        """Take this rank out for good, telling the others why; on any thread.

        Pending handles of this rank fail with `ShutdownError`, those of the others
        with `RankLeftError`. Returns whether all ranks have agreed to the end within
        `timeout` seconds; false too if the runtime had broken before.
        """
        if self._leaving is None:
            self._leaving = reason
        self._doorbell.ring()
        if threading.current_thread() is self._thread:
            return False
        if not self._ended.wait(timeout):
            return False
        self._thread.join(timeout)
        return not self._broken

    @property
    def ended(self) -> bool:
        """Whether the cycle thread serves no further submissions."""
        return self._ended.is_set()

    # The cycle thread.

    def _run(self) -> None:
        wake_on_time()
        try:
            while self.end is None:
                self._gather()
                self._cycle()
            self._drain()
            self._executor.close()
            self._wire.close()
        except BaseException as error:  # noqa: BLE001 - whatever it was, nobody may wait for this thread any more.
            self._break(error)
        finally:
            if self.tuning is not None:
                self.tuning.close()
            self._ended.set()

    def _gather(self) -> None:
        """Sleep until there is a reason to begin a cycle."""
        entered, working = self._clock(), self._under_way.works
        while self._leaving is None:
            now = self._clock()
            if working:
                self._poll(now)
                if self._under_way.full:
                    self._doorbell.wait(self._under_way.nap(now, LONGEST_NAP_S))
                    self._wire.check()
                    continue
            nbytes, since, urged = self._table.fresh()
            if since is not None:
                delay = pace.gathering_delay(
                    now,
                    nbytes=nbytes,
                    since=since,
                    urged=urged,
                    threshold=self._settings.fusion_threshold,
                    cycle_time_s=self._settings.cycle_time_s,
                )
            elif self._negotiator.pending:
                delay = pace.retry_delay(now - self._progressed_at) - (now - entered)
            else:
                delay = pace.heartbeat(now - self._progressed_at) - (now - entered)
            if delay <= 0.0:
                return
            nap = self._under_way.nap(now, delay) if working else delay
            if not self._doorbell.wait(nap) and since is None and nap >= delay:
                return

    def _poll(self, now: float) -> None:
        """Complete what was under way and has come to its end."""
        for entries, work in self._under_way.poll(now):
            if not work.early:
                self._complete(entries)
                continue
            for entry in entries:
                entry.complete()
            self.bell.ring()

    def _drain(self) -> None:
        """Wait for what is still under way, at the end of a runtime that has not failed."""
        while self._under_way:
            now = self._clock()
            self._poll(now)
            time.sleep(self._under_way.nap(now, LONGEST_NAP_S))
            self._wire.check()

    def _cycle(self) -> None:
        start = self._clock()
        self._take_submissions(start)
        leaving = self._leaving
        self._wire.start(self._negotiator.compose(self._flags(leaving, start), start))
        self._await_round(start)
        outcome = self._negotiator.absorb(self._wire.result())
        negotiated = self._clock()
        self._recorder.cycle(start, negotiated, len(outcome.ready))
        if outcome.ready:
            self._execute(outcome.ready, negotiated)
        if outcome.exchange:
            self._exchange(leaving, last=outcome.leaving)

    def _take_submissions(self, now: float) -> None:
        entries = self._table.drain()
        if entries:
            self._progressed_at = now
            refused = self._negotiator.submit_all([entry.request for entry in entries], now)
            for name, reason in refused.items():
                self._fail(self._present([name]), MismatchError(reason))
        if self._leaving is not None:
            self._drain()
            self._negotiator.forget_all()
            self._fail(
                self._table.close(ShutdownError(f"this rank has left the job: {self._leaving}")),
                ShutdownError(f"this rank left the job while the operation was pending: {self._leaving}"),
            )

    def _flags(self, leaving: str | None, now: float) -> Flag:
        flags = Flag(0)
        if leaving is not None:
            flags |= Flag.LEAVE
        oldest = self._oldest()
        if oldest is not None and self._stall.due(now - oldest):
            flags |= Flag.STALL
        if self.tuning is not None and self.tuning.wanted is not None:
            flags |= Flag.TUNE
        return flags

    def _oldest(self) -> float | None:
        return self._table.oldest() if self._negotiator.pending else None

    def _await_round(self, start: float) -> None:
        """Poll the cycle's all-reduce; a submission in between makes the polling keen again."""
        checked = start
        since = start
        working = self._under_way.works
        while not self._wire.test():
            now = self._clock()
            nap = patience(now - since, idle=not self._negotiator.pending)
            if working:
                self._poll(now)
                nap = self._under_way.nap(now, nap)
            if not nap:
                self._spin(now)
            elif self._doorbell.wait(nap):
                since = self._clock()
            if now - checked > CHECK_EVERY_S:
                self._wire.check()
                self._stall.silence(now - start)
                checked = now

    def _execute(self, ready: tuple[int, ...], negotiated: float) -> None:
        responses, slots = self._plans.get(ready)
        for response in responses:
            self._run_response(response, negotiated)
            if self._under_way.works:
                self._poll(self._clock())
        self._negotiator.executed(slots)
        self._progressed_at = self._clock()
        if self.tuning is not None:
            self.tuning.ran(responses, negotiated, self._negotiator.joined)

    def _run_response(self, response: Response, negotiated: float) -> None:
        reason = refusal(response, self._negotiator.joined, self._wire)
        if reason is not None:
            self._fail(self._present(response.names), reason)
            return
        entries = self._entries(response)
        self._recorder.queued(response, entries, negotiated)
        try:
            work = self._executor.execute(response, entries)
        except RankLeftError:
            raise
        except (FusionError, ValueError) as error:  # Every rank raised it alike; see `Executor`.
            self._fail(entries, error)
            return
        self._recorder.response(response)
        finished = last_parts(entries) if response.grouped else entries
        if work is None:
            self._complete(finished)
        else:
            self._launched(response.names, finished, work)

    def _present(self, names: Iterable[str]) -> list[Entry]:
        return [entry for entry in self._table.get_all(names) if entry is not None]

    def _entries(self, response: Response) -> list[Entry]:
        """This rank's entries for the parts of a response; stand-ins if it has joined."""
        found = self._table.get_all(response.names)
        if not all(found):
            found = [
                self._absent(part.request) if entry is None else entry
                for part, entry in zip(response.parts, found, strict=True)
            ]
        return cast("list[Entry]", found)

    def _absent(self, request: Request) -> Entry:
        if not self._negotiator.joined >> self._wire.rank & 1:
            raise AssertionError(f"'{request.name}' was agreed as ready but is not in this rank's table")
        return self._executor.absent(request, Handle(request.name, self.bell))

    def _complete(self, entries: list[Entry]) -> None:
        self._table.remove([entry.request.name for entry in entries])
        plain = [entry for entry in entries if entry.unpack is None]
        complete_all([entry.handle for entry in plain], [entry.outputs[0] for entry in plain])
        if len(plain) < len(entries):
            for entry in entries:
                entry.convert()
        self.bell.ring()

    def _launched(self, names: tuple[str, ...], entries: list[Entry], work: Work) -> None:
        """A response is under way. Names are free again if outputs can be had in a device's order."""
        if work.early:
            self._table.remove([entry.request.name for entry in entries])
        self._under_way.add(self._clock(), names, entries, work)
        self.bell.ring()

    def _fail(self, entries: list[Entry], error: BaseException) -> None:
        self._table.remove([entry.request.name for entry in entries])
        for entry in entries:
            entry.inputs, entry.outputs = (), []  # The error's traceback may hold the entry.
            if not entry.handle.done():
                entry.handle.set_exception(error)
        self.bell.ring()

    def _exchange(self, leaving: str | None, *, last: bool) -> None:
        now = self._clock()
        report = self._negotiator.report(self._table.ages(now), leaving)
        if self.tuning is not None:
            report.knobs = self.tuning.wanted
        merged = self._wire.exchange(report, merge)
        if last:
            self._drain()
            self._end(departure(merged, self._wire))
            return
        verdict = self._stall.verdict(merged, self._wire.size, self._negotiator.joined)
        if verdict is not None:
            self._end(verdict)
            return
        self._stall.warn(merged, self._wire.rank, self._wire.size, self._negotiator.joined)
        resolution = self._negotiator.resolve(merged)
        for name, mismatch in resolution.mismatches.items():
            entry = self._table.get(name)
            if entry is not None and mismatch.ranks >> self._wire.rank & 1:
                self._fail([entry], MismatchError(mismatch.reason))
        if resolution.all_joined:
            self._joined(resolution.last_joined)
        if merged.knobs is not None:
            self._retune(merged.knobs)

    def _retune(self, knobs: Knobs) -> None:
        """Take settings that all ranks take now; what was planned with the old ones is dropped."""
        assert self.tuning is not None, "all ranks tune, or none"
        self.tuning.take(knobs)
        self._settings = msgspec.structs.replace(
            self._settings, fusion_threshold=knobs.fusion_threshold, cycle_time_s=knobs.cycle_time_s
        )
        self._table.full = knobs.fusion_threshold
        self._plans = PlanCache(self._negotiator.registry, knobs.fusion_threshold)

    def _joined(self, last: int) -> None:
        """All ranks have joined: each one's `join` returns the last of them."""
        entry = self._table.get(JOIN.name)
        if entry is not None:
            entry.outputs[0] = last
            self._complete([entry])

    def _end(self, error: FusionError) -> None:
        self._fail(self._table.close(error), error)
        self.end = error

    def _break(self, error: BaseException) -> None:
        """The cycle thread cannot go on: tell this rank's callers and the other ranks."""
        self._broken = True
        me = self._wire.ranks[self._wire.rank]
        if isinstance(error, FusionError):
            end: FusionError = error
        else:
            end = RuntimeBrokenError(f"the cycle thread of rank {me} failed: {error!r}")
            end.__cause__ = error
            logger.error("%s", end, exc_info=error)
        self._end(end)
        self._under_way.fail(end)
        self.bell.ring()
        try:
            if not isinstance(error, RankLeftError):  # Of that the others know from the rank that failed.
                self._wire.announce(str(end))
            self._executor.abort()
        except Exception:
            logger.exception("the failure of rank %d could not be seen to its end", me)
