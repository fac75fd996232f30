"""Which settings to try next: Optuna's tree-structured Parzen estimator, asked and told one at a time.

The first sample is the settings the job began with. Most samples explore. The last
few go once more to the start and the best ones, in turns, and these alone decide,
because the best of many noisy measurements is partly a lucky one. Of settings that
are about as good, those nearest to the start win: a key that makes no difference
here keeps its value.

Reproducible: the same measurements lead to the same settings. Rank 0, cycle
thread. Needs the extra `tune`; `optuna` is imported when a search is made.

Bergstra et al., "Algorithms for hyper-parameter optimization", 2011.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Sequence
from typing import Any

from coordinator.errors import FusionError
from coordinator.tuning import Knobs
from fusion.tuning.space import Space

SEED = 20
_STARTUP = 10
"""Samples drawn at random before the estimator has something to go by."""
_CONFIRM = 8
_FINALISTS = 4
_ABOUT_AS_GOOD = 1.02
"""Settings whose steps take at most so many times the best are not told apart by time."""
_POLISH = 8
"""Samples kept for the neighbours of the best settings, at which the estimator seldom looks."""
_PATIENCE = 12
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
        self._polish = min(_POLISH, samples // 5)
        self._study, self._distributions = _study(space, seed)
        self._study.enqueue_trial(space.places(space.start))
        self._measured: dict[Knobs, list[float]] = {}
        self._confirmed: dict[Knobs, list[float]] = {}
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
    def confirming(self) -> bool:
        """Whether what is measured now decides, so that it is worth some time."""
        return self._finalists is not None

    @property
    def best(self) -> tuple[Knobs, float]:
        """The best settings so far and the seconds of their step; the start if nothing was measured."""
        start = self._space.start
        if not self._measured:
            return start, math.nan
        best = self._leader(self._finalists or list(self._measured))
        return best, self._seconds(best)

    @property
    def fastest(self) -> float:
        """Seconds of the shortest step measured; NaN before the first."""
        return min(map(self._seconds, self._measured), default=math.nan)

    @property
    def start_seconds(self) -> float:
        """Of a step with the settings of the start; NaN before they were measured."""
        return self._seconds(self._space.start) if self._space.start in self._measured else math.nan

    def next(self) -> Knobs | None:
        """What to measure next, and `tell` about; None when the search is over."""
        if self._taken >= self._samples:
            return None
        if self._finalists is None and not self._explored():
            self._asked = self._explore()
            return self._asked
        if self._finalists is None and self._taken < self._samples - self._confirm:
            self._asked = self._neighbour()
            if self._asked is not None:
                return self._asked
        if self._finalists is None:
            by_time = sorted(self._measured, key=self._seconds)
            first = [self._space.start, self._leader(by_time), *by_time]
            self._finalists = list(dict.fromkeys(first))[:_FINALISTS]
        if self._left_to_confirm() and len(self._finalists) > 1:
            self._asked = min(self._finalists, key=lambda knobs: len(self._confirmed.get(knobs, ())))
        else:
            self._asked = None
        return self._asked

    def tell(self, seconds: float) -> None:
        """A step with the settings that `next` returned takes `seconds`."""
        assert self._asked is not None, "tell follows next"
        before = self.fastest
        kept = self._measured if self._finalists is None else self._confirmed
        kept.setdefault(self._asked, []).append(seconds)
        self._taken += 1
        if self._trial is not None:
            self._study.tell(self._trial, _score(seconds))
            self._trial = None
        if not seconds >= _PROGRESS * before:
            self._progress_at = self._taken

    def _leader(self, among: Sequence[Knobs]) -> Knobs:
        """Of the settings that are about as good as the best, those nearest to the start."""
        limit = _ABOUT_AS_GOOD * min(map(self._seconds, among))
        good = [knobs for knobs in among if self._seconds(knobs) <= limit]
        return min(good, key=lambda knobs: (self._space.changes(knobs), self._seconds(knobs)))

    def _seconds(self, knobs: Knobs) -> float:
        """Of a step; of settings that were measured once more, without the time that made them finalists."""
        return statistics.median(self._confirmed.get(knobs) or self._measured[knobs])

    def _explored(self) -> bool:
        if len(self._measured) >= self._space.size:
            return True
        stuck = self._taken - self._progress_at >= _PATIENCE and self._taken >= _STARTUP + _PATIENCE
        return stuck or self._taken >= self._samples - self._confirm - self._polish

    def _left_to_confirm(self) -> bool:
        return sum(map(len, self._confirmed.values())) < self._confirm

    def _explore(self) -> Knobs:
        """Settings not measured yet, if the estimator has any: of known ones it is told what is known."""
        for redraw in range(_REDRAWS + 1):
            trial = self._study.ask(self._distributions)
            knobs = self._space.at(trial.params)
            if knobs not in self._measured:
                break
            if redraw < _REDRAWS:
                self._study.tell(trial, _score(self._seconds(knobs)))
        self._trial = trial
        return knobs

    def _neighbour(self) -> Knobs | None:
        """Settings not measured yet that are the best but for one key.

        The key is as at the start, or one place beside.
        """
        best = self._space.places(self._leader(list(self._measured)))
        start = self._space.places(self._space.start)
        back = [(key, start[key]) for key in best]
        beside = [(key, place) for key in best for place in (best[key] - 1, best[key] + 1)]
        for key, place in [*back, *beside]:
            if 0 <= place < len(self._space.choices[key]):
                knobs = self._space.at({**best, key: place})
                if knobs not in self._measured:
                    return knobs
        return None


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
