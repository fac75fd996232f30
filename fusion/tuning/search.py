"""Which settings to try next: Optuna's tree-structured Parzen estimator, asked and told one at a time.

The first sample is the settings the job began with. Most samples explore; the last
few go once more to the best ones, because the best of many noisy measurements is
partly a lucky one. The settings of the start win unless others are clearly better.

Reproducible: the same measurements lead to the same settings. Rank 0, cycle
thread. Needs the extra `tune`; `optuna` is imported when a search is made.

Bergstra et al., "Algorithms for hyper-parameter optimization", 2011.
"""

from __future__ import annotations

import math
import statistics
import warnings
from typing import Any

from coordinator.errors import FusionError
from coordinator.tuning import Knobs
from fusion.tuning.space import Space

SEED = 20
_STARTUP = 10
"""Samples drawn at random before the estimator has something to go by."""
_CONFIRM = 6
_FINALISTS = 3
_CLEARLY = 0.98
"""Settings replace those of the start if their steps take at most this share of the time."""
_PATIENCE = 16
_PROGRESS = 0.99
_REDRAWS = 8


class Search:
    """A search for the settings with the shortest step.

    Args:
        space: the settings that may be tried.
        samples: how many measurements it may ask for.
        seed: of the estimator.

    Raises:
        FusionError: Optuna is not installed.
    """

    def __init__(self, space: Space, samples: int, seed: int = SEED) -> None:
        self._space = space
        self._samples = samples
        self._confirm = min(_CONFIRM, samples // 5)
        self._study, self._distributions = _study(space, seed)
        self._study.enqueue_trial(space.places(space.start))
        self._measured: dict[Knobs, list[float]] = {}
        self._taken = 0
        self._progress_at = 0
        self._trial: Any = None
        self._asked: Knobs | None = None
        self._finalists: list[Knobs] | None = None

    @property
    def taken(self) -> int:
        """Measurements so far."""
        return self._taken

    @property
    def best(self) -> tuple[Knobs, float]:
        """The best settings so far and the seconds of their step; the start if nothing was measured."""
        if not self._measured:
            return self._space.start, math.nan
        best, start = min(self._measured, key=self._seconds), self._space.start
        if start in self._measured and self._seconds(best) > _CLEARLY * self._seconds(start):
            best = start
        return best, self._seconds(best)

    @property
    def start_seconds(self) -> float:
        """Of a step with the settings of the start; NaN before they were measured."""
        return self._seconds(self._space.start) if self._space.start in self._measured else math.nan

    def next(self) -> Knobs | None:
        """What to measure next, and `tell` about; None when the search is over."""
        if self._taken >= self._samples:
            return None
        if self._finalists is None and self._explored():
            self._finalists = sorted(self._measured, key=self._seconds)[:_FINALISTS]
        if self._finalists is None:
            self._asked = self._explore()
        elif self._left_to_confirm() and len(self._finalists) > 1:
            self._asked = min(self._finalists, key=lambda knobs: len(self._measured[knobs]))
        else:
            self._asked = None
        return self._asked

    def tell(self, seconds: float) -> None:
        """A step with the settings that `next` returned takes `seconds`."""
        assert self._asked is not None, "tell follows next"
        before = self.best[1] if self._measured else math.inf
        self._measured.setdefault(self._asked, []).append(seconds)
        self._taken += 1
        if self._trial is not None:
            self._study.tell(self._trial, _score(seconds))
            self._trial = None
        if seconds < _PROGRESS * before:
            self._progress_at = self._taken

    def _seconds(self, knobs: Knobs) -> float:
        return statistics.median(self._measured[knobs])

    def _explored(self) -> bool:
        if len(self._measured) >= self._space.size:
            return True
        stuck = self._taken - self._progress_at >= _PATIENCE and self._taken >= _STARTUP + _PATIENCE
        return stuck or self._taken >= self._samples - self._confirm

    def _left_to_confirm(self) -> bool:
        assert self._finalists is not None
        return sum(len(self._measured[knobs]) - 1 for knobs in self._finalists) < self._confirm

    def _explore(self) -> Knobs:
        """Settings not measured yet; an estimator that insists on known ones is told what is known."""
        for _ in range(_REDRAWS):
            trial = self._study.ask(self._distributions)
            knobs = self._space.at(trial.params)
            if knobs not in self._measured:
                break
            self._study.tell(trial, _score(self._seconds(knobs)))
        else:
            knobs = self._neighbour()
            self._study.enqueue_trial(self._space.places(knobs))
            trial = self._study.ask(self._distributions)
        self._trial = trial
        return knobs

    def _neighbour(self) -> Knobs:
        """Settings not measured yet, as near to the best measured ones as can be."""
        for known in sorted(self._measured, key=self._seconds):
            places = self._space.places(known)
            for key, values in self._space.choices.items():
                for place in (places[key] - 1, places[key] + 1):
                    knobs = self._space.at({**places, key: place}) if 0 <= place < len(values) else known
                    if knobs not in self._measured:
                        return knobs
        raise AssertionError("the space is connected, and was not measured through")


def _score(seconds: float) -> float:
    """What the estimator models: ratios, not differences."""
    return math.log(max(seconds, 1e-9))


def require_optuna() -> Any:
    """Import Optuna.

    Raises:
        FusionError: it is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise FusionError(
            f'autotune is "on", which needs Optuna, and it cannot be imported ({error}): '
            "pip install 'tensor-fusion-runtime[tune]', or leave autotune off"
        ) from error
    return optuna


def _study(space: Space, seed: int) -> tuple[Any, dict[str, Any]]:
    optuna = require_optuna()
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # It announces every study.
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=_STARTUP, multivariate=True)
        study = optuna.create_study(sampler=sampler, direction="minimize")
    finally:
        optuna.logging.set_verbosity(verbosity)
    distributions = {
        key: optuna.distributions.IntDistribution(0, len(values) - 1) for key, values in space.choices.items()
    }
    return study, distributions
