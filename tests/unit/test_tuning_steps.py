"""What a step is, and which steps can be compared."""

from __future__ import annotations

import math

from coordinator.messages import OpKind, Part, Region, Request, Response
from coordinator.planner import fuse
from fusion.tuning.steps import Step, Steps, Usual, Work


def request(name: str, count: int = 256, **options: object) -> Request:
    return Request(name, OpKind.ALLREDUCE, ("float32",), ((count,),), **options)


def responses(*names: str, threshold: int = 1 << 20) -> tuple[Response, ...]:
    return fuse(map(request, names), threshold)


def test_a_step_ends_when_a_name_comes_again() -> None:
    steps = Steps()
    assert steps.ran(responses("a", "b"), 1.0) == []
    assert steps.ran(responses("c"), 1.5) == []
    (first,) = steps.ran(responses("a", "b"), 3.0)
    assert math.isnan(first.seconds)
    assert steps.ran(responses("c"), 3.5) == []
    assert steps.ran(responses("a", "b", "c"), 5.0) == [Step(Work(3, 3072, 0), 2.0)]


def test_work_does_not_depend_on_how_it_was_fused() -> None:
    works = []
    for threshold in (0, 2048, 1 << 20):
        steps = Steps()
        for step in range(3):
            ended = steps.ran(responses("a", "b", "c", threshold=threshold), float(step))
        works.append(ended[0].work)
    assert works == [Work(3, 3072, 0)] * 3


def test_the_tensors_of_a_group_are_told_apart() -> None:
    group = Request("g", OpKind.ALLREDUCE, ("float32", "float64"), ((4,), (4,)))
    steps = Steps()
    assert steps.ran(fuse([group], 0), 0.0) == []
    assert len(steps.ran(fuse([group], 0), 1.0)) == 1


def test_names_that_never_come_again_make_no_steps_and_are_not_remembered() -> None:
    steps = Steps()
    for number in range(10):
        ended = steps.ran(responses("a", f"allreduce.noname.{number}"), float(number))
    assert ended == [Step(Work(2, 2048, 0), 1.0)]
    assert not any("noname" in str(name) for name in steps._seen)


def test_barriers_and_arenas_are_no_work() -> None:
    steps = Steps()
    nothing = [
        Response(kind, "uint8", (Part(Request("x", kind, ("uint8",), ((1 << 20,),)), 0),))
        for kind in (OpKind.BARRIER, OpKind.ARENA)
    ]
    for number in range(3):
        ended = steps.ran([*nothing, *responses("a")], float(number))
    assert ended == [Step(Work(1, 1024, 0), 1.0)]


def test_bytes_in_static_buckets_are_counted_apart() -> None:
    static = request("bucket", 512, region=Region(0, 0))
    steps = Steps()
    for number in range(3):
        ended = steps.ran([*fuse([static], 0), *responses("a")], float(number))
    assert ended[0].work == Work(2, 3072, 2048)


def step(nbytes: int) -> Step:
    return Step(Work(1, nbytes, 0), 1.0)


def test_usual_is_what_moves_most_bytes_again_and_again() -> None:
    usual = Usual()
    for nbytes in (999_999, 100, 7, 100):
        assert not usual.fits(step(nbytes))
    assert usual.work == Work(1, 100, 0)
    assert usual.fits(step(100))
    assert not usual.fits(step(7))


def test_an_evaluation_does_not_change_what_is_usual_but_another_model_does() -> None:
    usual = Usual()
    for _ in range(Usual.LEARN):
        usual.fits(step(100))
    for _ in range(Usual.PATIENCE - 1):
        assert not usual.fits(step(5))
    assert usual.fits(step(100))
    for _ in range(Usual.PATIENCE):
        usual.fits(step(300))
    assert usual.work is None
    for _ in range(Usual.LEARN):
        usual.fits(step(300))
    assert usual.fits(step(300))
