"""When the stall watch speaks, and what it says."""

from __future__ import annotations

import pytest

from coordinator.errors import StallError
from coordinator.reports import Report
from coordinator.simulation import tensor
from coordinator.stall import MOST_NAMES, StallWatch


def waiting(*names: str, age: float, ranks: int = 0b01) -> Report:
    return Report(ranks={tensor(name): ranks for name in names}, ages=dict.fromkeys(names, age), leaving={})


def test_each_warning_waits_for_twice_the_age_of_the_one_before() -> None:
    watch = StallWatch(10.0, 0.0)
    asked = []
    for second in range(200):
        if watch.due(float(second)):
            asked.append(second)
            watch.warned(float(second))
    assert asked == [10, 20, 40, 80, 160]


def test_a_new_stall_is_reported_from_the_start() -> None:
    watch = StallWatch(10.0, 0.0)
    watch.warned(100.0)
    assert not watch.due(50.0)
    assert not watch.due(1.0)
    assert watch.due(10.0)


def test_it_can_be_switched_off() -> None:
    watch = StallWatch(0.0, 0.0)
    assert not watch.due(1e9)
    assert watch.describe(waiting("a", age=1e9), 2) is None
    assert watch.verdict(waiting("a", age=1e9), 2) is None


def test_only_the_missing_ranks_of_late_names_are_listed() -> None:
    report = waiting("late", age=12.0, ranks=0b1011)
    report.ranks |= {tensor("early"): 0b0001}
    report.ages["early"] = 3.0
    text = StallWatch(10.0, 0.0).describe(report, 4)
    assert text == "stalled: 'late' for 12.0 s, submitted by ranks 0, 1, 3, MISSING on rank 2"


def test_ranks_that_have_joined_are_not_missing() -> None:
    text = StallWatch(10.0, 0.0).describe(waiting("a", age=12.0, ranks=0b001), 3, joined=0b010)
    assert text is not None and text.endswith("MISSING on rank 2")


def test_long_lists_of_names_are_cut() -> None:
    text = StallWatch(10.0, 0.0).describe(waiting(*(f"t{i:03}" for i in range(200)), age=12.0), 2)
    assert text is not None and text.count("MISSING") == MOST_NAMES
    assert text.endswith(f"; and {200 - MOST_NAMES} more")


def test_beyond_the_limit_it_is_an_error_that_names_the_limit() -> None:
    watch = StallWatch(0.0, 30.0)
    assert watch.verdict(waiting("a", age=29.0), 2) is None
    error = watch.verdict(waiting("a", age=31.0), 2)
    assert isinstance(error, StallError) and "stall_shutdown_s = 30" in str(error)


def test_a_rank_that_does_not_answer_at_all_is_an_error_beyond_the_limit() -> None:
    watch = StallWatch(10.0, 30.0)
    watch.silence(29.0)
    with pytest.raises(StallError, match="stopped or keeps the GIL"):
        watch.silence(31.0)
