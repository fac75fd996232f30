"""When a cycle begins."""

from __future__ import annotations

import itertools

from coordinator.pace import gathering_delay, heartbeat, retry_delay


def delay(now: float, nbytes: int = 10, urged: bool = False) -> float:
    return gathering_delay(now, nbytes=nbytes, since=100.0, urged=urged, threshold=1000, cycle_time_s=0.5)


def test_tensors_are_gathered_for_one_cycle_time() -> None:
    assert delay(100.0) == 0.5
    assert delay(100.25) == 0.25
    assert delay(100.5) == delay(200.0) == 0.0


def test_a_full_buffer_or_a_caller_that_waits_begins_a_cycle_at_once() -> None:
    assert delay(100.0, nbytes=1000) == 0.0
    assert delay(100.0, urged=True) == 0.0


def test_an_idle_rank_takes_part_a_few_times_a_second_at_first_and_twice_later() -> None:
    """So an hour without work costs about 7,200 cycles."""
    now, cycles = 0.0, 0
    while now < 60.0:
        now += heartbeat(now)
        cycles += 1
    assert cycles < 140
    assert heartbeat(3600.0) == 0.5


def test_a_rank_that_waits_for_others_asks_less_and_less_often_but_never_rarely() -> None:
    delays = [retry_delay(waited) for waited in (0.0, 1e-3, 1e-2, 1.0, 3600.0)]
    assert delays[0] == 0.0
    assert all(one <= other for one, other in itertools.pairwise(delays))
    assert delays[-1] == 5e-3
