"""Ring operations under way at once: how many, and in which order they end."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest

from coordinator.waiting import Waiter
from fusion.collectives.pipeline import DEPTH, Operation, Pipeline
from fusion.collectives.ring import BATCH, MEASURED, Pace


class Node:
    """Ranks of a node, of which the others make announcements when told."""

    def __init__(self) -> None:
        self.mine = self.others = 0

    def announce(self) -> int:
        self.mine += 1
        return self.mine

    def announced(self, number: int) -> bool:
        return self.others >= number


class Ring:
    """A ring operation that comes to its end after some looks."""

    def __init__(self, looks: int) -> None:
        self.looks = looks
        self.complete = False
        self.first = True

    def advance(self) -> bool:
        assert not self.complete, "an end that was seen is not looked for again"
        self.looks -= 1
        self.complete = self.looks <= 0
        return self.complete

    def rest(self) -> float:
        return 1e-5 * self.looks


@pytest.fixture
def made() -> SimpleNamespace:
    node, done = Node(), []
    pipeline = Pipeline(Waiter(lambda: None))

    def begin(name: str, looks: int | None) -> Operation:
        ring = None if looks is None else Ring(looks)
        operation = Operation(
            node, ring, lambda: done.append(f"{name} rung"), lambda: done.append(f"{name} unpacked")
        )
        pipeline.add(operation)
        return operation

    return SimpleNamespace(node=node, done=done, pipeline=pipeline, begin=begin)


def test_operations_end_in_the_order_in_which_they_began(made: SimpleNamespace) -> None:
    made.node.others = 100
    made.begin("a", 5)
    made.begin("b", 1)
    assert made.done == []
    made.pipeline.drain()
    assert made.done == ["a rung", "a unpacked", "b rung", "b unpacked"]
    assert len(made.pipeline) == 0 and not made.pipeline.advance()


def test_an_operation_ends_when_every_rank_of_the_node_has_rung(made: SimpleNamespace) -> None:
    first = made.begin("a", None)
    second = made.begin("b", None)
    assert made.done == ["a rung"] and not first.done
    assert not made.pipeline.advance(), "there is nothing to do but wait"
    made.node.others = 1
    assert made.pipeline.advance() and first.done and not second.done
    assert made.done == ["a rung", "a unpacked", "b rung"]


def test_entering_waits_until_there_is_room(made: SimpleNamespace) -> None:
    made.node.others = 100
    lanes = []
    for index in range(2 * DEPTH):
        lanes.append(made.pipeline.enter())
        assert len(made.pipeline) < DEPTH
        made.begin(str(index), 50)
    assert lanes[:DEPTH] == lanes[DEPTH:] and sorted(lanes[:DEPTH]) == list(range(DEPTH))
    assert made.done[:2] == ["0 rung", "0 unpacked"]


def test_only_the_oldest_may_use_the_link_as_it_likes(made: SimpleNamespace) -> None:
    first, second = made.begin("a", 2), made.begin("b", 9)
    assert first.crossing.first and not second.crossing.first
    made.node.others = 1
    made.pipeline.advance()
    made.pipeline.advance()
    assert first.done and second.crossing.first


def test_what_an_operation_was_about_goes_with_its_end() -> None:
    """A job refers to its last operation, which refers to the job; nobody must have to look for circles."""

    class Job:
        last: Operation

        def end(self) -> None:
            pass

    node, pipeline, job = Node(), Pipeline(Waiter(lambda: None)), Job()
    node.others = 1
    job.last = Operation(node, None, job.end, job.end)
    gone = weakref.ref(job)
    gc.disable()
    try:
        pipeline.add(job.last)
        del job
        assert gone() is None
    finally:
        gc.enable()


def test_lingering_ends_with_the_operation_or_before_long(made: SimpleNamespace) -> None:
    made.node.others = 1
    near, far = made.begin("a", 3), made.begin("b", None)
    made.pipeline.linger(near)
    assert near.done
    made.pipeline.linger(far)
    assert not far.done


def test_the_pace_is_that_of_the_last_segments_without_the_first_wait() -> None:
    now = [0.0]
    pace = Pace(lambda: now[0])
    pace.begin()
    now[0] = 100.0
    for _ in range(MEASURED):
        pace.came()
        now[0] += 0.5
    assert pace.seconds == 0.0
    pace.came()
    assert pace.seconds == 0.5 and BATCH > 1
