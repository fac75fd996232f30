"""Settings change on all ranks at the same point, whatever else happens: real cycle threads, no MPI."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from coordinator.coordinator import JOIN
from coordinator.errors import RankLeftError
from coordinator.messages import Response
from coordinator.negotiation import Flag
from coordinator.reports import Report, merge
from coordinator.simulation import Fabric, tensor
from coordinator.tuning import Knobs
from tests.protocol.threads import DEFAULTS, Ranks, failure, running

KNOBS = [Knobs(mb, cycle, 1024, 60, "on") for mb, cycle in ((0.0, 0.0), (1.0, 2.0), (0.25, 0.1), (8.0, 5.0))]


class Script:
    """Wants the next settings of a list after every few responses."""

    def __init__(self, wishes: Sequence[Knobs], every: int = 3) -> None:
        self._wishes = list(wishes)
        self._every = every
        self.seen = self.disturbances = self.closed = 0
        self.wanted: Knobs | None = None
        self.fail = False

    @property
    def finished(self) -> bool:
        return not self._wishes and self.wanted is None

    def ran(self, responses: Sequence[Response], at: float) -> None:
        if self.fail:
            raise ArithmeticError("lost count")
        self.seen += len(responses)
        if self.seen >= self._every and self._wishes and self.wanted is None:
            self.wanted = self._wishes.pop(0)

    def disturbed(self) -> None:
        self.disturbances += 1

    def applied(self) -> None:
        self.wanted, self.seen = None, 0

    def close(self) -> None:
        self.closed += 1


def train(ranks: Ranks, steps: int, tensors: int = 8, nap: float = 0.0) -> list[list[float]]:
    """Every rank, in a thread and an order of its own, reduces the same tensors again and again."""
    results: list[list[float]] = [[] for _ in ranks.coordinators]

    def work(rank: int) -> None:
        draw = random.Random(rank)
        for step in range(steps):
            order = draw.sample(range(tensors), tensors)
            handles = {index: ranks.submit(rank, tensor(f"t{index}"), index + step) for index in order}
            results[rank] += [handles[index].result(10) for index in range(tensors)]
            time.sleep(draw.random() * nap)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(results))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_ranks_change_between_the_same_two_responses(size: int) -> None:
    with running(size, tuner=Script(KNOBS)) as ranks:
        results = train(ranks, steps=30, nap=0.003)
        first = ranks.executors[0]
        assert [knobs for _, knobs in first.retuned] == KNOBS
        for executor in ranks.executors:
            assert executor.retuned == first.retuned
            assert executor.ran == first.ran
    assert results == [[float(size * (index + step)) for step in range(30) for index in range(8)]] * size


def test_fusion_follows_the_settings() -> None:
    alone = Knobs(0.0, 0.0, 1024, 60, "on")
    together = msgspec.structs.replace(DEFAULTS, cycle_time_s=0.2)
    with running(2, together, Script([alone])) as ranks:
        train(ranks, steps=6)
        (change, _), *others = ranks.executors[0].retuned
        assert not others
        assert max(len(response.parts) for response in ranks.executors[0].ran[:change]) > 1
        assert {len(response.parts) for response in ranks.executors[0].ran[change:]} == {1}


def test_a_tuner_that_is_done_is_closed_and_asked_no_more() -> None:
    script = Script(KNOBS[:1])
    with running(2, tuner=script) as ranks:
        train(ranks, steps=5)
        assert (script.closed, script.seen) == (1, 0)
        train(ranks, steps=5)
        assert script.seen == 0
    assert script.closed == 1


def test_the_end_of_the_job_closes_a_tuner_that_is_not_done() -> None:
    script = Script(KNOBS, every=1000)
    with running(2, tuner=script) as ranks:
        train(ranks, steps=2)
        assert script.closed == 0
    assert script.closed == 1


def test_a_rank_that_leaves_while_settings_change_is_named_as_ever() -> None:
    script = Script(KNOBS * 100, every=1)
    with running(3, tuner=script) as ranks:
        train(ranks, steps=3)
        waiting = ranks.submit(0, tensor("x"), 1.0)
        ranks.coordinators[2].leave("it called shutdown()", timeout=10)
        error = failure(waiting)
        assert isinstance(error, RankLeftError)
        assert "rank 2" in str(error)
        _wait_for(lambda: all(coordinator.ended for coordinator in ranks.coordinators))
        assert ranks.executors[1].retuned == ranks.executors[0].retuned
    assert script.closed == 1


def test_a_tuner_that_fails_leaves_the_job_running(caplog: pytest.LogCaptureFixture) -> None:
    script = Script(KNOBS)
    with running(2, tuner=script) as ranks:
        script.fail = True
        assert train(ranks, steps=5)[0][:2] == [0.0, 2.0]
        assert not ranks.executors[0].retuned
    assert "tuning has failed" in caplog.text


def test_what_runs_while_a_rank_has_joined_is_no_sample() -> None:
    script = Script(KNOBS, every=1)
    with running(3, tuner=script) as ranks:
        joins = [ranks.submit(1, JOIN, 0.0)]
        for _ in range(4):
            handles = [ranks.submit(rank, tensor("x"), 2.0) for rank in (0, 2)]
            assert [handle.result(10) for handle in handles] == [4.0, 4.0]
        assert script.seen == 0
        assert script.disturbances > 0
        joins += [ranks.submit(rank, JOIN, 0.0) for rank in (0, 2)]
        for join in joins:
            join.result(10)


def test_a_change_is_agreed_while_a_rank_has_joined() -> None:
    script = Script(KNOBS[:1], every=1)
    with running(3, tuner=script) as ranks:
        handles = [ranks.submit(rank, tensor("x"), 1.0) for rank in range(3)]
        joins = [ranks.submit(1, JOIN, 0.0)]
        assert [handle.result(10) for handle in handles] == [3.0] * 3
        _wait_for(lambda: all(len(executor.retuned) == 1 for executor in ranks.executors))
        assert ranks.executors[1].retuned == ranks.executors[0].retuned
        for join in [*joins, *(ranks.submit(rank, JOIN, 0.0) for rank in (0, 2))]:
            join.result(10)


def test_the_flag_makes_all_ranks_exchange_and_settings_travel_once() -> None:
    fabric = Fabric(5)
    fabric.cycle({0: Flag.TUNE})
    assert fabric.exchanges == 1
    fabric.cycle()
    assert fabric.exchanges == 1
    reports = [Report({}, {}, {}, knobs=KNOBS[1] if rank == 0 else None) for rank in range(5)]
    left = merge(reports[0], reports[1])
    right = merge(merge(reports[2], reports[3]), reports[4])
    assert merge(left, right).knobs == KNOBS[1]


def _wait_for(condition: Callable[[], Any], timeout: float = 10.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.005)
