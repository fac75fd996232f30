"""The search on made-up costs: near the best of a full grid in 40 samples, whatever the landscape."""

from __future__ import annotations

import builtins
import itertools
import math
import random
from collections.abc import Callable

import pytest

from coordinator.errors import FusionError
from coordinator.tuning import Knobs
from fusion.config import Config
from fusion.tuning.search import Search
from fusion.tuning.space import Space, space_of

SPACE = space_of(Config(chunk_kb=1024, ring_segment_kb=60), (), [(0, 1), (2, 3)])
SAMPLES = 40

Cost = Callable[[Knobs], float]


def landscape(seed: int) -> Cost:
    """Seconds of a step that computes and sends: cost of messages, of the wire, of the cache, of waiting."""
    draw = random.Random(seed)
    total_mb = draw.choice([10, 50, 100])
    per_buffer, per_message = draw.choice([0.05, 0.2, 1.0]), draw.choice([0.002, 0.01])
    mb_per_ms = draw.choice([0.1, 0.4, 1.0])
    compute = draw.choice([0, 10, 50, 200])
    cache, steep = draw.choice(SPACE.choices["chunk_kb"]), draw.uniform(0, 0.4)
    eager = draw.choice([60, 120, 240])

    def cost(knobs: Knobs) -> float:
        buffers = math.ceil(total_mb / knobs.fusion_threshold_mb)
        wire = total_mb / mb_per_ms * (1.5 if knobs.ring_segment_kb > eager else 1.0)
        wire += total_mb * 1024 / knobs.ring_segment_kb * per_message
        first = min(total_mb, knobs.fusion_threshold_mb) / mb_per_ms if compute else 0.0
        memory = 0.1 * total_mb * (1 + steep * abs(math.log2(knobs.chunk_kb / cache)))
        return (max(compute, wire) + first + memory + buffers * per_buffer + knobs.cycle_time_ms / 2) / 1e3

    return cost


def run(space: Space, cost: Cost, samples: int = SAMPLES, noise: float = 0.0, seed: int = 0) -> Search:
    draw = random.Random(seed)
    search = Search(space, samples)
    while (knobs := search.next()) is not None:
        search.tell(cost(knobs) * (1 + abs(draw.gauss(0, noise))))
    return search


def grid(space: Space) -> list[Knobs]:
    places = [range(len(values)) for values in space.choices.values()]
    return [space.at(dict(zip(space.choices, point, strict=True))) for point in itertools.product(*places)]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_it_comes_within_5_percent_of_the_full_grid_in_40_samples(seed: int, noise: float) -> None:
    cost = landscape(seed)
    search = run(SPACE, cost, noise=noise, seed=seed)
    assert search.taken <= SAMPLES
    assert SPACE.size > 30 * SAMPLES
    assert cost(search.best[0]) <= 1.05 * min(map(cost, grid(SPACE)))


def test_the_same_measurements_lead_to_the_same_settings() -> None:
    asked = []
    for _ in range(2):
        search = Search(SPACE, SAMPLES)
        mine = []
        while (knobs := search.next()) is not None:
            mine.append(knobs)
            search.tell(landscape(5)(knobs))
        asked.append((mine, search.best))
    assert asked[0] == asked[1]


def test_the_first_sample_is_what_the_job_began_with() -> None:
    assert Search(SPACE, SAMPLES).next() == SPACE.start


def test_settings_that_make_no_difference_stay_as_they_were() -> None:
    search = run(SPACE, lambda knobs: 1.0 + (knobs.ring_segment_kb > 30))
    best, _ = search.best
    assert best.ring_segment_kb <= 30
    assert SPACE.changes(best) == 1
    assert run(SPACE, lambda _: 1.0, noise=0.005).best[0] == SPACE.start


def test_a_single_lucky_measurement_does_not_win() -> None:
    lucky = []

    def cost(knobs: Knobs) -> float:
        if knobs != SPACE.start and not lucky:
            lucky.append(knobs)
            return 0.1
        return 1.0 + 0.1 * SPACE.changes(knobs)

    assert run(SPACE, cost).best[0] == SPACE.start


def test_a_small_space_is_measured_through_and_then_over() -> None:
    space = space_of(Config(chunk_kb=1024, ring_segment_kb=60), (), [(0, 1), (2, 3), (4, 5)])
    assert set(space.choices) == {"ring_segment_kb"}
    search = run(space, lambda knobs: abs(knobs.ring_segment_kb - 240))
    assert search.best[0].ring_segment_kb == 240
    assert search.taken < 20


@pytest.mark.parametrize("samples", [1, 2, 5, 12])
def test_few_samples_are_never_exceeded(samples: int) -> None:
    search = run(SPACE, landscape(1), samples)
    assert search.taken == samples
    assert search.next() is None


def test_it_stops_early_where_nothing_gets_better() -> None:
    assert run(SPACE, lambda _: 1.0).taken < SAMPLES


def test_without_optuna_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: object, **others: object) -> object:
        if name == "optuna":
            raise ImportError("No module named 'optuna'")
        return real(name, *rest, **others)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(FusionError, match=r"tensor-fusion-runtime\[tune\]"):
        Search(SPACE, SAMPLES)
