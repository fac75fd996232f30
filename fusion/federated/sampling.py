"""Who takes part in a round: pure functions of a seed, so that all ranks agree without a message."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np


def seed_of(*numbers: int) -> int:
    """A seed for random numbers of one purpose, such as (seed, round, client)."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


def choose_clients(
    examples: Mapping[int, int], fraction: float, *, seed: int, round_number: int
) -> tuple[int, ...]:
    """The clients of a round, ascending: a uniform sample without replacement of those that have data.

    Args:
        examples: number of examples of every client.
        fraction: share of the clients with data, above 0 and up to 1; at least one client is chosen.
        seed: of the training.
        round_number: of the round.

    Raises:
        ValueError: no client has data, or a fraction out of range.
    """
    check_fraction(fraction)
    able = sorted(client for client, count in examples.items() if count)
    if not able:
        raise ValueError("no client has any data: there is nothing to average")
    count = max(1, round(fraction * len(able)))
    picked = np.random.default_rng([seed, round_number]).choice(len(able), size=count, replace=False)
    return tuple(able[index] for index in sorted(picked))


def check_fraction(fraction: float) -> None:
    """Raise ValueError unless it is a share."""
    if not math.isfinite(fraction) or not 0 < fraction <= 1:
        raise ValueError(f"fraction must be above 0 and at most 1; got {fraction}")
