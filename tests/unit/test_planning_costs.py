"""The cost model finds what measurements were made of, also when some of them are spoiled."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from fusion.planning.costs import KNOTS, Costs, Curve, Sample, fit
from fusion.planning.workload import PlanError

TRUTH = Curve(wait_s=2e-4, cycle_s=1e-4, response_s=3e-4, tensor_s=1e-6, slopes=(4e-9, 6e-9, 8e-9, 9e-9))


def samples_of(curve: Curve, *, noise: float = 0.0) -> list[Sample]:
    """Experiments as `measure.py` makes them."""
    rng = np.random.default_rng(7)
    designs = [(1, 1, 64 << exponent) for exponent in range(0, 19, 2)]
    designs += [(4, 4, 1 << exponent) for exponent in (10, 14, 16, 18, 20)]
    designs += [(1, tensors, 1024 * tensors) for tensors in (16, 128)]
    found = []
    for responses, tensors, nbytes in designs:
        each = float(curve.response(nbytes, tensors // responses))
        seconds = curve.wait_s + curve.cycle_s + responses * each
        seconds *= 1 + noise * rng.uniform(-1, 1)
        found.append(Sample(responses, tensors, nbytes, seconds, curve.cycle_s))
    return found


def test_exact_measurements_give_their_model_back() -> None:
    found = fit(samples_of(TRUTH))
    for field in ("wait_s", "cycle_s", "response_s", "tensor_s", "slopes"):
        assert getattr(found, field) == pytest.approx(getattr(TRUTH, field), rel=1e-3), field


def test_noise_shifts_costs_by_no_more_than_itself() -> None:
    found = fit(samples_of(TRUTH, noise=0.05))
    for nbytes in (1 << 12, 1 << 18, 1 << 24):
        assert float(found.response(nbytes, 1)) == pytest.approx(float(TRUTH.response(nbytes, 1)), rel=0.15)


def test_a_spoiled_measurement_is_outvoted() -> None:
    samples = samples_of(TRUTH)
    spoiled = msgspec.structs.replace(samples[6], seconds=5 * samples[6].seconds)
    found = fit([*samples[:6], spoiled, *samples[7:]])
    assert float(found.response(1 << 24, 1)) == pytest.approx(float(TRUTH.response(1 << 24, 1)), rel=0.05)
    assert float(found.response(1 << 14, 1)) == pytest.approx(float(TRUTH.response(1 << 14, 1)), rel=0.2)


def test_no_cost_is_negative() -> None:
    slower_when_small = [
        Sample(1, 1, 1 << 10, 2e-3),
        Sample(1, 1, 1 << 14, 1e-3),
        Sample(1, 1, 1 << 20, 5e-3),
    ]
    found = fit(slower_when_small)
    assert min(found.wait_s, found.cycle_s, found.response_s, found.tensor_s, *found.slopes) >= 0


def test_beyond_the_largest_measurement_the_last_slope_goes_on() -> None:
    small = [Sample(1, 1, nbytes, 1e-4 + 1e-8 * nbytes) for nbytes in (64, 4096, 16384, 1 << 17)]
    assert fit(small).slopes[1:] == pytest.approx((1e-8,) * (len(KNOTS) - 1), rel=1e-3)


def test_costs_of_many_responses_at_once_are_those_of_each() -> None:
    sizes = np.array([0.0, 100.0, 20_000.0, 3e6])
    assert TRUTH.response(sizes, np.ones(4)) == pytest.approx(
        [float(TRUTH.response(size, 1)) for size in sizes]
    )


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([Sample(1, 1, 64, 1e-3)] * 3, "two sizes"),
        ([Sample(1, 1, 64, 1e-3), Sample(1, 1, 128, 0.0)], "no time"),
        ([Sample(1, 1, 64, 1e-3), Sample(1, 1, 1 << 20, 1e-3)], "no longer"),
    ],
)
def test_measurements_that_say_nothing_are_refused(samples: list[Sample], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        fit(samples)


@pytest.mark.parametrize(
    ("nodes", "hierarchy", "words"),
    [
        ((2,), "auto", "shared memory"),
        ((1, 1), "auto", "ring between nodes"),
        ((2, 2), "on", "shared memory, ring between nodes"),
        ((2, 2), "off", "ring over all ranks"),
    ],
)
def test_the_algorithm_is_named(nodes: tuple[int, ...], hierarchy: str, words: str) -> None:
    costs = Costs(nodes, hierarchy, 1 << 20, TRUTH, TRUTH)
    assert costs.algorithm == words
    assert costs.ranks == sum(nodes)


def test_costs_survive_json() -> None:
    costs = Costs((1, 1), "auto", 1 << 20, TRUTH, TRUTH)
    assert msgspec.json.decode(msgspec.json.encode(costs), type=Costs) == costs
