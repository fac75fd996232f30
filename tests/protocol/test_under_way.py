"""Operations that a device was given: when their handles complete, and what callers get before."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from coordinator.coordinator import Coordinator
from coordinator.errors import RuntimeBrokenError, StallError
from coordinator.executor import Entry
from coordinator.handle import Bell, Handle
from coordinator.messages import OpKind, Request, Response
from coordinator.recorder import Recorder
from coordinator.settings import Settings
from coordinator.under_way import LONGEST_NAP_S, UnderWay
from tests.protocol.threads import Hub, SummingExecutor, ThreadWire

SETTINGS = Settings(1 << 20, 1e-3, 64, 60.0, 0.0)


class Slow:
    """A response that a device is done with when told."""

    early = True

    def __init__(self) -> None:
        self.finished = False
        self.joined: list[str] = []
        self.abandoned = False
        self.error: Exception | None = None

    def join(self) -> None:
        self.joined.append(threading.current_thread().name)

    def done(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.finished

    def rest(self) -> float:
        return 0.0

    def abandon(self) -> None:
        self.abandoned = True


def complete(under_way: UnderWay, now: float) -> None:
    for entries, _ in under_way.poll(now):
        for entry in entries:
            entry.complete()


def made(name: str = "t", output: object = "output") -> Entry:
    return Entry(
        Request(name, OpKind.ALLREDUCE, ("float32",), ((),)), [1.0], [output], Handle(name, Bell()), 0.0
    )


def test_an_output_can_be_had_before_its_handle_is_done() -> None:
    under_way, work, entry = UnderWay(0.0, 0.0), Slow(), made()
    under_way.add(0.0, ("t",), [entry], work)
    assert entry.handle.result(0.0) == "output" and not entry.handle.done()
    assert work.joined == [threading.current_thread().name]


def test_a_handle_is_done_and_calls_back_when_the_device_is() -> None:
    under_way, work, entry = UnderWay(0.0, 0.0), Slow(), made()
    called = []
    entry.handle.add_done_callback(called.append)
    under_way.add(0.0, ("t",), [entry], work)
    assert not under_way.poll(1.0) and not called
    work.finished = True
    complete(under_way, 2.0)
    assert entry.handle.done() and called == [entry.handle]
    assert entry.handle.result() == "output" and not work.joined and not under_way


def test_waiting_for_an_error_does_not_wait_for_the_device() -> None:
    under_way, entry = UnderWay(0.0, 0.0), made()
    under_way.add(0.0, ("t",), [entry], Slow())
    assert entry.handle.exception(0.0) is None


def test_an_early_output_is_what_the_caller_asked_to_make_of_it() -> None:
    under_way, entry = UnderWay(0.0, 0.0), made()
    entry.unpack = lambda outputs: [outputs[0], "more"]
    under_way.add(0.0, ("t",), [entry], Slow())
    assert entry.handle.result(0.0) == ["output", "more"]


def test_works_complete_in_the_order_of_their_launch() -> None:
    under_way, first, second = UnderWay(0.0, 0.0), Slow(), Slow()
    entries = [made("a"), made("b")]
    under_way.add(0.0, ("a",), [entries[0]], first)
    under_way.add(0.0, ("b",), [entries[1]], second)
    second.finished = True
    assert not under_way.poll(1.0)
    first.finished = True
    assert [finished for finished, _ in under_way.poll(1.0)] == [[entry] for entry in entries]


def test_polls_come_further_apart_the_longer_the_device_works() -> None:
    under_way = UnderWay(0.0, 0.0)
    assert under_way.nap(0.0, 5.0) == 5.0
    under_way.add(0.0, ("t",), [made()], Slow())
    naps = [under_way.nap(age, 5.0) for age in (0.0, 1e-3, 4e-3, 10.0)]
    assert naps == sorted(naps) and naps[0] < 1e-4 and naps[-1] == LONGEST_NAP_S


def test_a_device_that_does_not_finish_is_warned_about_once_and_then_ends_the_runtime(
    caplog: pytest.LogCaptureFixture,
) -> None:
    under_way = UnderWay(10.0, 100.0)
    under_way.add(0.0, ("a", "b"), [made()], Slow())
    with caplog.at_level(logging.WARNING, "fusion"):
        for now in (5.0, 11.0, 12.0):
            under_way.poll(now)
    assert [record.getMessage() for record in caplog.records] == [
        "'a' and 1 more has been under way for 11 s"
    ]
    with pytest.raises(StallError, match="'a' and 1 more has been under way for 101 s"):
        under_way.poll(101.0)


def test_nothing_that_is_under_way_outlives_a_failure() -> None:
    under_way, work, entry = UnderWay(0.0, 0.0), Slow(), made()
    under_way.add(0.0, ("t",), [entry], work)
    under_way.fail(StallError("over"))
    with pytest.raises(StallError, match="over"):
        entry.handle.result()
    assert work.abandoned and not under_way


class Launching(SummingExecutor):
    """Launches what it runs, and is done when told."""

    def __init__(self, hub: Hub, rank: int) -> None:
        super().__init__(hub, rank)
        self.works: list[Slow] = []

    def execute(self, response: Response, entries: list[Entry]) -> Slow:  # type: ignore[override]
        super().execute(response, entries)
        self.works.append(Slow())
        return self.works[-1]


def running() -> tuple[Coordinator, Launching]:
    hub = Hub(1)
    executor = Launching(hub, 0)
    coordinator = Coordinator(ThreadWire(hub, 0), executor, SETTINGS, Recorder(0))
    coordinator.start()
    return coordinator, executor


def submit(coordinator: Coordinator, name: str, value: float) -> Handle:
    handle = Handle(name, coordinator.bell)
    request = Request(name, OpKind.ALLREDUCE, ("float32",), ((),))
    coordinator.submit(Entry(request, [value], [None], handle, time.monotonic()))
    return handle


def test_a_name_is_free_again_when_its_operation_was_launched() -> None:
    coordinator, executor = running()
    first = submit(coordinator, "t", 1.0)
    assert first.result(10.0) == 1.0
    second = submit(coordinator, "t", 2.0)
    assert second.result(10.0) == 2.0 and not first.done() and not second.done()
    for work in executor.works:
        work.finished = True
    assert coordinator.leave("the end", 10.0)
    assert first.done() and second.done() and executor.closed


def test_leaving_waits_for_the_device() -> None:
    coordinator, executor = running()
    handle = submit(coordinator, "t", 1.0)
    handle.result(10.0)
    assert not coordinator.leave("the end", 0.2) and not executor.closed
    executor.works[0].finished = True
    assert coordinator.leave("the end", 10.0)
    assert handle.result() == 1.0


def test_a_failure_of_the_device_ends_the_runtime_and_aborts_the_executor() -> None:
    coordinator, executor = running()
    handle = submit(coordinator, "t", 1.0)
    handle.result(10.0)
    executor.works[0].error = RuntimeError("remote process exited")
    while not coordinator.ended:
        time.sleep(1e-3)
    with pytest.raises(RuntimeBrokenError, match="remote process exited"):
        handle.result()
    assert executor.aborted and executor.works[0].abandoned and not executor.closed
    with pytest.raises(RuntimeBrokenError):
        submit(coordinator, "u", 1.0)
