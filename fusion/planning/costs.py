"""What a reduction costs on the ranks at hand: a small model, and its fit to measurements.

    seconds of one wait = wait + cycles * cycle + responses * response + tensors * tensor
                          + sum over responses of size(bytes)

`size` is piecewise linear through zero: inside a node small buffers stay in cache
and large ones do not, and between nodes small messages hide in the latency while
large ones run at the wire's rate; the knots are where `chooser.py`'s algorithms
change what they do (a page, a chunk, a buffer). Dynamic buckets (copied through
the fusion buffer) and static ones (reduced in place) have a model each.

Medians go in, and the fit weighs relative errors by Huber's function, so a sample
that the scheduler spoiled does not bend the line. Coefficients are never negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from fusion.planning.workload import PlanError

Floats = npt.NDArray[np.float64]
Buckets = Literal["dynamic", "static"]

KNOTS = (0, 1 << 14, 1 << 18, 1 << 21)
"""Bytes at which the slope of `size` may change."""
_TOLERATED = 0.05
"""Relative error up to which a sample counts fully in the fit."""
_ROUNDS = 20


class Sample(msgspec.Struct, frozen=True):
    """The median of one experiment: equal responses, submitted together and waited for."""

    responses: int
    tensors: int
    """Of all responses together."""
    nbytes: int
    """Of one response."""
    seconds: float
    """From the first submission to the last result, on the slowest rank."""
    negotiate_s: float = 0.0
    """Of these, what the ranks took to agree."""


class Curve(msgspec.Struct, frozen=True):
    """The costs of one kind of buckets; seconds.

    Attributes:
        wait_s: between a result and the thread that waits for it, once a step.
        cycle_s: agreeing on what is ready.
        response_s: a response, whatever its size.
        tensor_s: a tensor in a response.
        slopes: seconds a byte from each of `KNOTS` on.
        hook_s: a gradient on the training thread, from autograd to the table.
        hook_s_per_byte: the same for each byte: static buckets copy a new gradient into its place.
        settle_s: a gradient on the training thread, after all are reduced.
        compute_stretch: how much longer computing takes while the runtime reduces.
        latency_stretch: how much longer cycles, responses and tensors take while the rank computes: the
            runtime's thread waits for a core.
        transfer_stretch: the same for bytes.
    """

    wait_s: float
    cycle_s: float
    response_s: float
    tensor_s: float
    slopes: tuple[float, ...]
    hook_s: float = 0.0
    hook_s_per_byte: float = 0.0
    settle_s: float = 0.0
    compute_stretch: float = 1.0
    latency_stretch: float = 1.0
    transfer_stretch: float = 1.0

    def response(self, nbytes: Floats | float, tensors: Floats | float) -> Floats:
        """Seconds of responses of these bytes and numbers of tensors, element by element."""
        found: Floats = self.latency(tensors) + self.transfer(nbytes)
        return found

    def latency(self, tensors: Floats | float) -> Floats:
        """The part of a response's seconds that does not depend on its bytes."""
        found: Floats = self.response_s + self.tensor_s * np.asarray(tensors, dtype=np.float64)
        return found

    def transfer(self, nbytes: Floats | float) -> Floats:
        """The part that does."""
        found: Floats = _pieces(np.asarray(nbytes, dtype=np.float64)) @ np.array(self.slopes)
        return found

    def while_computing(self) -> Curve:
        """The costs for a rank that computes all the time."""
        slow, late = self.transfer_stretch, self.latency_stretch
        return msgspec.structs.replace(
            self,
            cycle_s=self.cycle_s * late,
            response_s=self.response_s * late,
            tensor_s=self.tensor_s * late,
            slopes=tuple(slope * slow for slope in self.slopes),
        )

    @property
    def bandwidth(self) -> float:
        """Bytes a second of large buffers."""
        return 1.0 / self.slopes[-1] if self.slopes[-1] else float("inf")


class Costs(msgspec.Struct, frozen=True):
    """Everything measured on one set of ranks.

    Attributes:
        nodes: ranks of each node.
        chunk_bytes: as configured; decides the memory of the buffers.
    """

    nodes: tuple[int, ...]
    hierarchy: str
    chunk_bytes: int
    dynamic: Curve
    static: Curve

    @property
    def ranks(self) -> int:
        return sum(self.nodes)

    @property
    def algorithm(self) -> str:
        """How these ranks reduce, in words; as `fusion.collectives.chooser` decides."""
        if self.hierarchy == "off":
            return "ring over all ranks"
        if len(self.nodes) == 1:
            return "shared memory"
        return "ring between nodes" if max(self.nodes) == 1 else "shared memory, ring between nodes"

    def curve(self, buckets: Buckets) -> Curve:
        """The costs of that kind of buckets."""
        return self.dynamic if buckets == "dynamic" else self.static


def fit(samples: Sequence[Sample]) -> Curve:
    """The model nearest to the samples.

    Raises:
        PlanError: the samples do not determine it, or some took no time.
    """
    if len({sample.nbytes for sample in samples}) < 2:
        raise PlanError("costs cannot be fitted: measure reductions of two sizes or more")
    if min(sample.seconds for sample in samples) <= 0:
        raise PlanError("costs cannot be fitted: a measured reduction took no time")
    rows = np.array([_row(sample) for sample in samples])
    seconds = np.array([sample.seconds for sample in samples])
    fixed, response, tensor, *slopes = _robust(rows, seconds)
    if not any(slopes):
        raise PlanError("costs cannot be fitted: larger reductions took no longer than small ones")
    cycle = min(float(np.median([sample.negotiate_s for sample in samples])), fixed)
    return Curve(fixed - cycle, cycle, response, tensor, _extended(slopes, samples))


def _row(sample: Sample) -> list[float]:
    pieces = _pieces(np.array(float(sample.nbytes)))
    return [1.0, sample.responses, sample.tensors, *(sample.responses * pieces)]


def _pieces(nbytes: Floats) -> Floats:
    """How many of the bytes lie between each knot and the next."""
    upper = np.array([*KNOTS[1:], np.inf])
    lower = np.array(KNOTS, dtype=np.float64)
    return np.clip(nbytes[..., None] - lower, 0.0, upper - lower)


def _extended(slopes: Sequence[float], samples: Sequence[Sample]) -> tuple[float, ...]:
    """The slopes, the last measured one going on where nothing larger was measured."""
    largest = max(sample.nbytes for sample in samples)
    measured = [slope for slope, knot in zip(slopes, KNOTS, strict=True) if knot < largest]
    return (*measured, *[measured[-1]] * (len(KNOTS) - len(measured)))


def _robust(rows: Floats, seconds: Floats) -> list[float]:
    """Iteratively reweighted least squares on relative errors (Huber)."""
    scaled = rows / seconds[:, None]
    weights = np.ones(len(seconds))
    found = np.zeros(rows.shape[1])
    for _ in range(_ROUNDS):
        root = np.sqrt(weights)
        found = _not_negative(scaled * root[:, None], root)
        errors = np.abs(scaled @ found - 1.0)
        weights = _TOLERATED / np.maximum(errors, _TOLERATED)
    coefficients: list[float] = found.tolist()
    return coefficients


def _not_negative(rows: Floats, target: Floats) -> Floats:
    """Least squares with coefficients >= 0 (Lawson and Hanson, "Solving least squares problems", 1974)."""
    scale = np.linalg.norm(rows, axis=0)
    scale[scale == 0] = 1.0
    matrix = rows / scale
    found = np.zeros(matrix.shape[1])
    free = np.zeros(matrix.shape[1], dtype=bool)
    for _ in range(10 * len(found)):
        gradient = matrix.T @ (target - matrix @ found)
        gradient[free] = -np.inf
        if free.all() or gradient.max() <= 1e-10 * len(target):
            break
        free[np.argmax(gradient)] = True
        while True:
            trial = np.zeros_like(found)
            trial[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            wrong = free & (trial <= 0)
            if not wrong.any():
                break
            step = np.min(found[wrong] / (found[wrong] - trial[wrong] + 1e-300))
            found = np.maximum(found + step * (trial - found), 0.0)
            free &= found > 1e-14
            if not free.any():
                trial = np.zeros_like(found)
                break
        found = trial
    answer: Floats = found / scale
    return answer
