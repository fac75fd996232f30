"""The tuner: measures steps, asks the search, and tells the coordinator what it wants. Rank 0, cycle thread.

A sample is the median time of the steps in a window. The first whole step after a
change is not counted: plans and views are made anew in it. A window ends when it
has enough steps to say something, earlier if the settings are plainly bad. When
the search is over all ranks change to the best settings and the tuner is done.
"""

from __future__ import annotations

import logging
import os
import statistics
from collections.abc import Collection, Sequence

import msgspec

from coordinator.errors import FusionError
from coordinator.messages import Response
from coordinator.tuning import Knobs
from fusion.config import Config
from fusion.tuning.record import SampleLog, write_yaml
from fusion.tuning.search import Search, require_optuna
from fusion.tuning.space import KEYS, Space, space_of
from fusion.tuning.steps import Step, Steps, Usual

logger = logging.getLogger("fusion")

LEAST_STEPS = 3
MOST_STEPS = 100
LEAST_S = 0.15
"""A window of very short steps goes on so long, to have more of them."""
CAREFUL_STEPS = 6
CAREFUL_S = 0.6
"""The same of windows that decide."""
HOPELESS = 1.5
"""Steps that all take so many times the best one end a window early."""
LEAST_HOPELESS_S = 0.05


class OnlineTuner:
    """Implements `coordinator.tuning.Tuner`.

    Args:
        space: the settings that may be tried.
        config: the settings of the job; names the files to write.
        pinned: the keys that the user gave.

    Raises:
        FusionError: Optuna is not installed.
        OSError: the log cannot be made.
    """

    def __init__(self, space: Space, config: Config, pinned: Collection[str]) -> None:
        require_optuna()
        self._space = space
        self._config = config
        self._pinned = pinned
        self._log = SampleLog(config.autotune_log)
        self._steps = Steps()
        self._usual = Usual()
        self._search: Search | None = None
        self._present = space.start
        self._window: list[float] = []
        self._settled = False
        self._over = False
        self._done = False
        self.wanted: Knobs | None = None

    @property
    def finished(self) -> bool:
        """Whether the best settings are in use."""
        return self._done

    def ran(self, responses: Sequence[Response], at: float) -> None:
        """See `coordinator.tuning.Tuner`."""
        for step in self._steps.ran(responses, at):
            if self.wanted is None:
                self._look_at(step)

    def disturbed(self) -> None:
        """See `coordinator.tuning.Tuner`."""
        self._steps.forget()

    def applied(self) -> None:
        """See `coordinator.tuning.Tuner`."""
        assert self.wanted is not None
        self._present, self.wanted = self.wanted, None
        self._begin_window()
        self._done = self._over

    def close(self) -> None:
        """See `coordinator.tuning.Tuner`."""
        self._log.close()
        search = self._search
        if search is None or not search.taken:
            if self._space.choices:
                logger.warning("nothing was tuned: no training step was seen to repeat")
            return
        path = self._config.autotune_file
        if path is not None:
            write_yaml(
                path, search, self._space, config=self._config, pinned=self._pinned, finished=self._over
            )
        best, seconds = search.best
        logger.info(
            "tuning %s after %d samples: %s; a step takes %.3g ms, before %.3g ms%s",
            "is complete" if self._over else "was cut short",
            search.taken,
            ", ".join(f"{key}={getattr(best, key)}" for key in KEYS if key in self._space.choices),
            1e3 * seconds,
            1e3 * search.start_seconds,
            f"; written to {path}" if path is not None else "",
        )

    def _look_at(self, step: Step) -> None:
        known = self._usual.work
        usual = self._usual.fits(step)
        if self._usual.work != known:
            self._start()
        elif usual and self._search is not None and not self._over:
            self._measure(step.seconds)

    def _start(self) -> None:
        """The usual work of a step is known, or has changed: samples so far are of something else."""
        if self._usual.work is None:
            return
        work, space = self._usual.work, self._space
        if 2 * work.in_arenas > work.nbytes:
            space = space.without("fusion_threshold_mb", "static buckets keep the layout they were made with")
        self._space = space
        if not space.choices:
            logger.warning("nothing is tuned: %s", _reasons(space))
            self._over = self._done = True
            return
        if self._search is not None:
            logger.info("the program's steps have changed: tuning begins anew")
        self._search = Search(space, self._config.autotune_samples)
        self._change(self._search.next())

    def _measure(self, seconds: float) -> None:
        if not self._settled:
            self._settled = True
            return
        self._window.append(seconds)
        search = self._search
        assert search is not None
        if self._enough(search.fastest):
            median = statistics.median(self._window)
            search.tell(median)
            self._log.sample(search.taken, self._present, len(self._window), median)
            self._change(search.next())

    def _enough(self, best: float) -> bool:
        steps = self._window
        least, least_s = LEAST_STEPS, LEAST_S
        if self._search is not None and self._search.confirming:
            least, least_s = CAREFUL_STEPS, CAREFUL_S
        if len(steps) >= 2 and sum(steps) >= LEAST_HOPELESS_S and min(steps) > HOPELESS * best:
            return True  # Never before there is a best one: nothing is greater than NaN.
        return len(steps) >= least and (sum(steps) >= least_s or len(steps) >= MOST_STEPS)

    def _change(self, knobs: Knobs | None) -> None:
        """Go on with these settings; None means with the best ones, for good."""
        assert self._search is not None
        if knobs is None:
            self._over = True
            knobs = self._search.best[0]
        if knobs == self._present and not self._over:
            self._begin_window()
        else:
            self.wanted = knobs

    def _begin_window(self) -> None:
        self._steps.forget()
        self._window = []
        self._settled = False


class Prepared(msgspec.Struct, frozen=True):
    """What a group needs for tuning.

    Attributes:
        space: also the `fusion.executor.Room` for the settings in it.
        tuner: on rank 0, if there is something to tune.
    """

    space: Space
    tuner: OnlineTuner | None


def prepare(config: Config, pinned: Collection[str], nodes: Sequence[Collection[int]], rank: int) -> Prepared:
    """What each rank makes of settings, keys and nodes that are the same on all."""
    space = space_of(config, pinned, nodes)
    if rank:
        return Prepared(space, None)
    for key, reason in space.left_alone.items():
        logger.info("tuning leaves %s alone: %s", key, reason)
    if not space.choices:
        logger.warning("nothing is tuned: %s", _reasons(space))
        return Prepared(space, None)
    return Prepared(space, OnlineTuner(space, config, pinned))


def check(config: Config) -> str | None:
    """Why this rank cannot tune as asked, or None if it can. Leaves no file behind."""
    if config.autotune == "off":
        return None
    try:
        require_optuna()
    except FusionError as error:
        return str(error)
    for key in ("autotune_file", "autotune_log"):
        path = getattr(config, key)
        folder = os.path.dirname(os.path.abspath(path)) if path else os.curdir
        if path and (os.path.isdir(path) or not os.access(folder, os.W_OK | os.X_OK)):
            return f"{key} cannot be {path}: it must be a file in a folder that rank 0 can write to"
    return None


def _reasons(space: Space) -> str:
    return "; ".join(f"{key}: {reason}" for key, reason in space.left_alone.items())
