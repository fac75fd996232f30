"""A training step as the runtime would run it, in simulated time.

The cycle thread does one thing at a time, so a step is a short story: it sleeps
until a cycle begins (`coordinator.pace`: a full buffer, the cycle time, or the
end of the backward pass, when the optimizer waits), agrees, and carries out what is
ready; what becomes ready meanwhile waits for the next cycle. The runtime's own
`coordinator.planner.fuse` and `fusion.bucketing.lay_out` make the buckets here, so
that a plan cannot drift from it.

Computing and reducing share cores: while both go on each is as much slower as
was measured (the stretches of `Curve`).

What is left out: ranks that are late, other traffic on the network, the optimizer's own update.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, takewhile
from math import inf
from typing import NamedTuple

import msgspec
import numpy as np

from coordinator.messages import OpKind, Region, Request, Response
from coordinator.planner import blocks, fuse
from fusion.bucketing import Item, lay_out
from fusion.memory import LEAST_BUFFER_BYTES
from fusion.planning.costs import Buckets, Costs, Curve, Floats
from fusion.planning.merging import Cost, Group, Indices, mg_wfbp, optimal
from fusion.planning.workload import Tensor, Workload

_MIB = 1 << 20
_PAGE = 4096
_FLAGS = 4
_INSTANT_S = 1e-12
"""Times nearer than that are one."""
_PASSES = 4
"""Solutions for ready times that the solution before shifted; they settle in two or three."""


class Settings(msgspec.Struct, frozen=True):
    """The runtime's settings that a step depends on."""

    threshold_mb: float
    cycle_s: float
    buckets: Buckets

    @property
    def threshold(self) -> int:
        return int(self.threshold_mb * _MIB)


class Prediction(msgspec.Struct, frozen=True):
    """A step under some settings.

    Attributes:
        buckets: fused all-reduces.
        cycles: negotiations that found something.
        step_s: forward, backward and reduction, without the optimizer's update.
        exposed_s: what reducing adds to the step.
        buffer_bytes: the fusion buffers of one rank.
    """

    threshold_mb: float
    buckets: int
    cycles: int
    step_s: float
    exposed_s: float
    buffer_bytes: int
    groups: tuple[int, ...] = ()
    """Numbers of tensors in each bucket, if buckets hold neighbours, as they do with one dtype."""


class Merging(msgspec.Struct, frozen=True):
    """A way to group tensors, and the step it makes.

    Attributes:
        groups: numbers of tensors, in the order in which they are ready.
    """

    groups: tuple[int, ...]
    step_s: float
    exposed_s: float


class _Entry(NamedTuple):
    """What is submitted at once: a tensor, or a static bucket."""

    ready: float
    """On the clock of the backward pass."""
    request: Request
    members: int = 1
    """Gradients it is about; the votes are none."""


class _Clock:
    """Wall time and the progress of the backward pass, which slows down while the runtime reduces."""

    def __init__(self, backward: float, curve: Curve) -> None:
        self.now = 0.0
        self.backward = backward
        self._curve = curve
        self._work = 0.0
        self._walls, self._works = [0.0], [0.0]

    @property
    def finished(self) -> bool:
        return self._work >= self.backward

    def wall(self, work: float) -> float:
        """When the backward pass came, or will come if the runtime stays idle, as far as `work`."""
        if work > self._work:
            return self.now + work - self._work
        after = bisect_left(self._works, work)
        if after == 0 or self._works[after] == work:
            return self._walls[after]
        share = (work - self._works[after - 1]) / (self._works[after] - self._works[after - 1])
        return self._walls[after - 1] + share * (self._walls[after] - self._walls[after - 1])

    def sleep(self, until: float) -> None:
        """The runtime is idle until `until`."""
        if until > self.now:
            self._advance(until - self.now, until - self.now)

    def reduce(self, latency: float, transfer: float = 0.0) -> None:
        """The runtime is busy, for so many seconds if it had the machine for itself."""
        seconds = latency + transfer
        if not self.finished and seconds > 0:
            curve = self._curve
            stretch = (latency * curve.latency_stretch + transfer * curve.transfer_stretch) / seconds
            wall = min(seconds * stretch, (self.backward - self._work) * curve.compute_stretch)
            self._advance(wall, wall / curve.compute_stretch)
            seconds -= wall / stretch
        self._advance(max(seconds, 0.0), 0.0)

    def _advance(self, wall: float, work: float) -> None:
        self.now += wall
        work = min(self._work + work, self.backward)
        # A pass that is within a rounding error of its end has ended.
        self._work = self.backward if self.backward - work <= 1e-12 * self.backward else work
        self._walls.append(self.now)
        self._works.append(self._work)


def predict(workload: Workload, costs: Costs, settings: Settings) -> Prediction:
    """The step of a `DistributedOptimizer` with these settings."""
    curve = costs.curve(settings.buckets)
    tensors, backward = _hooked(workload, curve)
    entries = (
        _static(tensors, backward, settings) if settings.buckets == "static" else _dynamic(tensors, backward)
    )
    clock = _Clock(backward, curve)
    buckets = cycles = number = 0
    groups: list[int] = []
    members = {entry.request.name: entry.members for entry in entries}
    while entries:
        clock.sleep(_begin(entries, clock, settings))
        taken = list(takewhile(lambda entry: clock.wall(entry.ready) <= clock.now + _INSTANT_S, entries))
        assert taken, "a cycle begins when something is ready"
        entries = entries[len(taken) :]
        responses = _responses([entry.request for entry in taken], number, settings.threshold)
        number += len(taken)
        clock.reduce(curve.cycle_s)
        for response in responses:
            clock.reduce(float(curve.latency(len(response.parts))), float(curve.transfer(response.nbytes)))
        buckets += len(responses)
        groups += [sum(members[part.request.name] for part in response.parts) for response in responses]
        cycles += 1
    step = _step(workload, clock, curve)
    return Prediction(
        settings.threshold_mb,
        buckets,
        cycles,
        step,
        step - workload.compute_s,
        buffer_bytes(costs, settings.threshold_mb),
        tuple(filter(None, groups)) if len({tensor.dtype for tensor in tensors}) == 1 else (),
    )


def _responses(requests: Sequence[Request], first: int, threshold: int) -> list[Response]:
    """What a cycle runs; requests have the slots from `first` on, as registered in the first step."""
    runs = blocks(tuple(range(first, first + len(requests))))
    planned = (fuse(requests[run[0] - first : run[-1] + 1 - first], threshold) for run in runs)
    return list(chain.from_iterable(planned))


def best_merging(
    workload: Workload, costs: Costs, buckets: Buckets, others: Iterable[tuple[int, ...]] = ()
) -> Merging:
    """The grouping with the shortest step, every group leaving as soon as it is complete.

    Exact where computing and reducing do not slow each other down. Where they do,
    groups shift the ready times on which they depend and cost more while the pass lasts, so
    optima are found for the ready times that the last one led to, for the costs with and
    without computing beside, and the best of these and of `others` is kept.

    Args:
        others: groupings to consider too, as numbers of tensors.
    """
    curve = costs.curve(buckets)
    tensors, backward = _hooked(workload, curve)
    found: Merging | None = None
    for sizes in filter(None, others):
        ends = list(accumulate(sizes))
        groups = list(zip([0, *ends], ends, strict=False))
        merging, _ready = _simulated(workload, tensors, backward, groups, curve)
        if found is None or merging.step_s < found.step_s:
            found = merging
    for assumed in (curve, curve.while_computing()):
        ready = [tensor.ready_s for tensor in tensors]
        for _ in range(_PASSES):
            groups, _done = optimal(ready, group_cost(tensors, assumed))
            merging, ready = _simulated(workload, tensors, backward, groups, curve)
            if found is None or merging.step_s < found.step_s:
                found = merging
    assert found is not None
    return found


def published_merging(workload: Workload, costs: Costs, buckets: Buckets) -> Merging:
    """The grouping of MG-WFBP's rule, for comparison."""
    curve = costs.curve(buckets)
    tensors, backward = _hooked(workload, curve)
    latency = curve.cycle_s + curve.response_s + curve.tensor_s
    groups = mg_wfbp(
        [tensor.ready_s for tensor in tensors],
        [tensor.nbytes for tensor in tensors],
        latency,
        curve.slopes[-1],
    )
    return _simulated(workload, tensors, backward, groups, curve)[0]


def group_cost(tensors: Sequence[Tensor], curve: Curve) -> Cost:
    """The seconds of a group of consecutive tensors: a cycle, and a response for each dtype in it."""
    sums = _sums_by_dtype(tensors)

    def cost(starts: Indices, stop: int) -> Floats:
        total = np.full(len(starts), curve.cycle_s)
        for nbytes, numbers in sums:
            count = numbers[stop] - numbers[starts]
            total += np.where(count > 0, curve.response(nbytes[stop] - nbytes[starts], count), 0.0)
        return total

    return cost


def _sums_by_dtype(tensors: Sequence[Tensor]) -> list[tuple[Floats, Floats]]:
    """For each dtype, its bytes and its tensors among the first n."""
    sums = []
    for dtype in sorted({tensor.dtype for tensor in tensors}):
        nbytes = [tensor.nbytes * (tensor.dtype == dtype) for tensor in tensors]
        numbers = [int(tensor.dtype == dtype) for tensor in tensors]
        sums.append((_prefix_sums(nbytes), _prefix_sums(numbers)))
    return sums


def buffer_bytes(costs: Costs, threshold_mb: float) -> int:
    """Bytes of the fusion buffers of one rank, see `fusion.collectives.node` and `hierarchical`."""
    chunk = max(1, costs.chunk_bytes // _PAGE) * _PAGE
    staging = 2 * chunk
    flat = costs.ranks > 1 and costs.hierarchy == "off"
    if len(costs.nodes) == 1 and not flat:
        return staging
    owners = 1 if flat else min(costs.nodes)
    each = -(-chunk // (owners * _PAGE)) * _PAGE
    vector = max(1, max(LEAST_BUFFER_BYTES, int(threshold_mb * _MIB), chunk) // chunk) * each
    return vector + staging * (2 if flat else 1)


def _step(workload: Workload, clock: _Clock, curve: Curve) -> float:
    """The length of the step when the runtime is done, or the pass, whatever is later."""
    settling = curve.wait_s + curve.settle_s * len(workload.tensors)
    return workload.forward_s + max(clock.now, clock.wall(clock.backward)) + settling


def _hooked(workload: Workload, curve: Curve) -> tuple[list[Tensor], float]:
    """The tensors and the end of the pass, when every gradient goes through the optimizer's hook."""
    late = 0.0
    tensors = []
    for tensor in workload.tensors:
        late += curve.hook_s + curve.hook_s_per_byte * tensor.nbytes
        tensors.append(msgspec.structs.replace(tensor, ready_s=tensor.ready_s + late))
    return tensors, workload.backward_s + late


def _dynamic(tensors: Sequence[Tensor], backward: float) -> list[_Entry]:
    """Every tensor by itself, and the votes at the end of the pass."""
    entries = [
        _Entry(tensor.ready_s, _request(tensor.name, tensor.dtype, tensor.count)) for tensor in tensors
    ]
    common = Counter(tensor.dtype for tensor in tensors).most_common(1)[0][0]
    return [*entries, _Entry(backward, _request("votes", common, len(tensors) + _FLAGS), 0)]


def _static(tensors: Sequence[Tensor], backward: float, settings: Settings) -> list[_Entry]:
    """A bucket when the last tensor in it is ready; the last bucket at the end of the pass."""
    items = [Item(index, tensor.dtype, tensor.count) for index, tensor in enumerate(tensors)]
    layout = lay_out(items, settings.threshold, len(tensors) + _FLAGS)
    entries = []
    for number, bucket in enumerate(layout.buckets):
        last = number == len(layout.buckets) - 1
        ready = backward if last else max(tensors[place.item.key].ready_s for place in bucket.places)
        region = Region(0, bucket.offset)
        request = _request(f"bucket{number}", bucket.dtype, bucket.count, region)
        entries.append(_Entry(ready, request, len(bucket.places)))
    return sorted(entries, key=lambda entry: entry.ready)


def _request(name: str, dtype: str, count: int, region: Region | None = None) -> Request:
    return Request(name, OpKind.ALLREDUCE, (dtype,), ((count,),), region=region)


def _begin(entries: Sequence[_Entry], clock: _Clock, settings: Settings) -> float:
    """When the next cycle begins: `coordinator.pace.gathering_delay`, with all that is to come known."""
    since = clock.wall(entries[0].ready)
    urged = clock.wall(clock.backward)  # The optimizer then waits.
    full = inf
    nbytes = 0
    for entry in entries:
        nbytes += entry.request.nbytes
        if nbytes >= settings.threshold:
            full = clock.wall(entry.ready)
            break
    return max(clock.now, since, min(since + settings.cycle_s, full, urged))


def _simulated(
    workload: Workload, tensors: Sequence[Tensor], backward: float, groups: Sequence[Group], curve: Curve
) -> tuple[Merging, list[float]]:
    """The step that groups make, and when each tensor was then ready."""
    clock = _Clock(backward, curve)
    sums = _sums_by_dtype(tensors)
    ready: list[float] = []
    for start, stop in groups:
        clock.sleep(clock.wall(tensors[stop - 1].ready_s))
        ready += [clock.wall(tensor.ready_s) for tensor in tensors[start:stop]]
        clock.reduce(curve.cycle_s)
        for nbytes, numbers in sums:
            count = numbers[stop] - numbers[start]
            if count > 0:
                clock.reduce(float(curve.latency(count)), float(curve.transfer(nbytes[stop] - nbytes[start])))
    step = _step(workload, clock, curve)
    sizes = tuple(stop - start for start, stop in groups)
    return Merging(sizes, step, step - workload.compute_s), ready


def _prefix_sums(values: Iterable[int]) -> Floats:
    sums: Floats = np.concatenate([[0.0], np.cumsum(np.array(list(values), dtype=np.float64))])
    return sums
