"""How long a wait sleeps, and what it does while it spins."""

from __future__ import annotations

import pytest

from coordinator.waiting import (
    CROWDED_FOR_S,
    CROWDED_S,
    LONGEST_EXPECTED_SLEEP_S,
    LONGEST_IDLE_SLEEP_S,
    LONGEST_SLEEP_S,
    SPIN_S,
    Spin,
    Waiter,
    patience,
)


class Core:
    """A clock, and a core whose yields take as long as it is told."""

    def __init__(self) -> None:
        self.now = 100.0
        self.yield_s = 1e-6
        self.done: list[str] = []

    def clock(self) -> float:
        return self.now

    def give_way(self) -> None:
        self.done.append("yield")
        self.now += self.yield_s

    def sleep(self, seconds: float) -> None:
        self.done.append("sleep")
        self.now += seconds


def test_a_short_wait_spins_and_a_long_one_sleeps_for_a_share_of_it() -> None:
    assert patience(SPIN_S / 2) == 0.0
    assert patience(2e-3) == pytest.approx(2e-3 / 8)
    assert patience(100.0) == LONGEST_SLEEP_S
    assert patience(100.0, idle=True) == LONGEST_IDLE_SLEEP_S


def test_a_wait_that_is_known_to_be_long_never_spins() -> None:
    assert patience(0.0, expected=SPIN_S) == 0.0
    assert patience(0.0, expected=4 * SPIN_S) == 4 * SPIN_S
    assert patience(0.0, expected=1.0) == LONGEST_EXPECTED_SLEEP_S


def test_spinning_yields_while_that_is_quick() -> None:
    core = Core()
    spin = Spin(core.clock, core.give_way, core.sleep)
    for _ in range(3):
        spin(core.now)
    assert core.done == ["yield"] * 3


def test_after_a_yield_that_took_long_spinning_sleeps_for_a_while() -> None:
    core = Core()
    spin = Spin(core.clock, core.give_way, core.sleep)
    core.yield_s = 2 * CROWDED_S
    spin(core.now)
    spin(core.now)
    core.now += CROWDED_FOR_S / 2
    spin(core.now)
    assert core.done == ["yield", "sleep", "sleep"]
    core.now += CROWDED_FOR_S
    core.yield_s = 1e-6
    spin(core.now)
    spin(core.now)
    assert core.done[3:] == ["yield", "yield"]


def test_a_wait_asks_now_and_then_whether_it_can_end() -> None:
    ticks = iter(range(1000))
    asked: list[int] = []
    looks: list[int] = []
    waiter = Waiter(lambda: asked.append(len(looks)), clock=lambda: next(ticks) / 100)

    def test() -> bool:
        looks.append(0)
        return len(looks) == 20

    waiter.until(test, expected=1.0)
    assert len(looks) == 20 and asked, "a failed rank would not have been noticed"


def test_a_short_look_gives_up_when_spinning_would() -> None:
    core = Core()
    waiter = Waiter(lambda: None, clock=core.clock)
    looks = iter((False, False, True))
    assert waiter.soon(lambda: next(looks))

    def late() -> bool:
        core.now += SPIN_S
        return False

    assert not waiter.soon(late)
