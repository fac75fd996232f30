"""The coordinator: real cycle threads, no MPI and no tensors."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest

from coordinator.coordinator import JOIN
from coordinator.errors import (
    DuplicateNameError,
    MismatchError,
    RankLeftError,
    RuntimeBrokenError,
    ShutdownError,
    StallError,
)
from coordinator.messages import OpKind, Request
from coordinator.simulation import tensor
from tests.protocol.threads import DEFAULTS, failure, running

sizes = pytest.mark.parametrize("size", [1, 2, 4])


@sizes
def test_every_name_gets_the_sum_of_its_own_values_whatever_the_order(size: int) -> None:
    with running(size) as ranks:
        names = [f"t{index}" for index in range(50)]
        handles = []
        for rank in range(size):
            order = random.Random(rank).sample(names, len(names))
            handles += [(name, ranks.submit(rank, tensor(name), float(name[1:]))) for name in order]
        random.Random(99).shuffle(handles)
        for name, handle in handles:
            assert handle.result(10) == size * float(name[1:])


def test_a_group_completes_as_one_and_in_order() -> None:
    group = Request("group", OpKind.ALLREDUCE, ("float32", "int64", "float32"), ((1,), (2,), (3,)))
    with running(2) as ranks:
        handles = [ranks.submit(rank, group, 1.0, 10.0, 100.0) for rank in range(2)]
        assert [handle.result(10) for handle in handles] == [[2.0, 20.0, 200.0]] * 2


def test_tensors_submitted_together_share_a_buffer() -> None:
    with running(2, msgspec.structs.replace(DEFAULTS, cycle_time_s=0.5)) as ranks:
        handles = [ranks.submit(rank, tensor(f"t{index}"), 1.0) for rank in range(2) for index in range(10)]
        for handle in handles:
            handle.result(10)
        assert [len(response.parts) for response in ranks.executors[0].ran] == [10]


def test_a_name_in_flight_is_refused_and_the_first_request_is_unharmed() -> None:
    with running(2) as ranks:
        first = ranks.submit(0, tensor("w"), 1.0)
        with pytest.raises(DuplicateNameError, match="'w'"):
            ranks.submit(0, tensor("w"), 5.0)
        second = ranks.submit(1, tensor("w"), 2.0)
        assert first.result(10) == second.result(10) == 3.0
        again = [ranks.submit(rank, tensor("w"), 4.0) for rank in range(2)]
        assert again[0].result(10) == 8.0


def test_a_mismatch_is_raised_on_every_rank_and_later_tensors_work() -> None:
    with running(3) as ranks:
        handles = [ranks.submit(rank, tensor("x", (4 + rank // 2,)), 1.0) for rank in range(3)]
        for handle in handles:
            error = failure(handle)
            assert isinstance(error, MismatchError)
            assert "'x'" in str(error) and "rank 2" in str(error)
        good = [ranks.submit(rank, tensor("x"), 1.0) for rank in range(3)]
        assert [handle.result(10) for handle in good] == [3.0] * 3


def test_shutdown_of_one_rank_fails_what_waits_for_it_and_names_it() -> None:
    with running(3) as ranks:
        waiting = ranks.submit(0, tensor("x"), 1.0)
        ranks.coordinators[2].leave("it called shutdown()", timeout=10)
        error = failure(waiting)
        assert isinstance(error, RankLeftError)
        assert "rank 2" in str(error) and "shutdown()" in str(error)
        _wait_for(lambda: ranks.coordinators[1].ended)
        with pytest.raises(RankLeftError, match="rank 2"):
            ranks.submit(1, tensor("y"), 1.0)


def test_own_shutdown_fails_pending_handles_and_refuses_new_ones() -> None:
    with running(2) as ranks:
        pending = ranks.submit(0, tensor("x"), 1.0)
        assert ranks.coordinators[0].leave("it called shutdown()", timeout=10)
        assert isinstance(failure(pending), ShutdownError)
        with pytest.raises(ShutdownError):
            ranks.submit(0, tensor("y"), 1.0)
        assert ranks.coordinators[0].leave("again", timeout=10)


def test_a_clean_end_closes_the_executor_of_every_rank() -> None:
    with running(2) as ranks:
        pass
    assert all(executor.closed for executor in ranks.executors)


def test_an_exception_in_the_executor_reaches_callers_with_its_cause_and_the_other_ranks() -> None:
    with running(2) as ranks:
        ranks.executors[1].fail_on = "x"
        ranks.executors[0].fail_on = None
        handles = [ranks.submit(rank, tensor("x"), 1.0) for rank in range(2)]
        other = ranks.submit(1, tensor("other"), 1.0)
        for handle in (handles[1], other):
            error = failure(handle)
            assert isinstance(error, RuntimeBrokenError)
            assert isinstance(error.__cause__, MemoryError)
        with pytest.raises(RuntimeBrokenError, match="no room"):
            ranks.submit(1, tensor("later"), 1.0)
        ranks.executors[0]._hub.give(("data", 1), 1, [0.0])  # Let rank 0 out of the step it is in.
        _wait_for(lambda: ranks.coordinators[0].ended)
        with pytest.raises(RankLeftError, match="no room"):
            ranks.submit(0, tensor("next"), 1.0)


def test_a_stall_is_reported_with_the_missing_ranks(caplog: pytest.LogCaptureFixture) -> None:
    settings = msgspec.structs.replace(DEFAULTS, stall_warning_s=0.05)
    with running(3, settings) as ranks:
        handles = [ranks.submit(rank, tensor("slow"), 1.0) for rank in range(2)]
        _wait_for(lambda: "stalled" in caplog.text)
        assert "'slow'" in caplog.text and "MISSING on rank 2" in caplog.text
        ranks.submit(2, tensor("slow"), 1.0)
        assert [handle.result(10) for handle in handles] == [3.0, 3.0]


def test_a_stall_beyond_the_limit_fails_every_rank_with_the_same_error() -> None:
    settings = msgspec.structs.replace(DEFAULTS, stall_shutdown_s=0.1)
    with running(2, settings) as ranks:
        handles = [ranks.submit(rank, tensor(f"only-{rank}"), 1.0) for rank in range(2)]
        errors = [failure(handle) for handle in handles]
        assert all(isinstance(error, StallError) for error in errors)
        assert str(errors[0]) == str(errors[1])
        assert "'only-0'" in str(errors[0]) and "MISSING on rank 1" in str(errors[0])


def test_a_handle_is_a_future() -> None:
    with running(2) as ranks:
        called = []
        handle = ranks.submit(0, tensor("x"), 1.0)
        handle.add_done_callback(called.append)
        assert not handle.done() and handle.running() and not handle.cancel()
        with pytest.raises(TimeoutError, match="'x'"):
            handle.result(0.01)
        ranks.submit(1, tensor("x"), 1.0)
        assert handle.result(10) == 2.0 and handle.exception() is None and handle.done()
        _wait_for(lambda: called == [handle])


def test_a_failing_callback_does_not_harm_the_runtime() -> None:
    with running(1) as ranks:
        handle = ranks.submit(0, tensor("x"), 1.0)
        handle.add_done_callback(lambda _: 1 / 0)
        assert handle.result(10) == 1.0
        assert ranks.submit(0, tensor("y"), 1.0).result(10) == 1.0


def test_an_unpack_that_fails_fails_its_own_handle_only() -> None:
    with running(1) as ranks:
        bad = Request("bad", OpKind.ALLREDUCE, ("float32",), ((1,),))
        handle = ranks.submit(0, bad, 1.0)
        assert handle.result(10) == 1.0
        assert ranks.submit(0, tensor("y"), 2.0).result(10) == 2.0


def _wait_for(condition: Callable[[], bool], timeout: float = 10.0) -> None:
    import time

    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.005)


def test_join_lets_the_others_go_on_and_returns_the_rank_that_joined_last() -> None:
    with running(3) as ranks:
        joins = {1: ranks.submit(1, JOIN, 0.0)}
        alone = [ranks.submit(rank, tensor("x"), 2.0) for rank in (0, 2)]
        assert [handle.result(10) for handle in alone] == [4.0, 4.0]
        joins[2] = ranks.submit(2, JOIN, 0.0)
        assert ranks.submit(0, tensor("y"), 5.0).result(10) == 5.0
        joins[0] = ranks.submit(0, JOIN, 0.0)
        assert [handle.result(10) for handle in joins.values()] == [0, 0, 0]
        together = [ranks.submit(rank, tensor("x"), 1.0) for rank in range(3)]
        assert [handle.result(10) for handle in together] == [3.0] * 3


def test_what_cannot_run_after_a_join_fails_on_the_live_ranks() -> None:
    alltoall = Request("x", OpKind.ALLTOALL, ("float32",), ((-1,),))
    with running(3) as ranks:
        ranks.submit(1, JOIN, 0.0)
        handles = [ranks.submit(rank, alltoall, 1.0) for rank in (0, 2)]
        for handle in handles:
            assert "rank 1 called join()" in str(failure(handle))
        assert ranks.submit(0, tensor("y"), 1.0).running()
        assert ranks.submit(2, tensor("y"), 1.0).result(10) == 2.0
