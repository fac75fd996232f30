"""Measures what reductions cost on the actual ranks, through the runtime itself.

Collective: every rank calls `measure` at the same point, on its main thread, with no
runtime up. It starts and ends runtimes of its own. The experiments:

- one tensor after the other, from 64 B up to what takes a fair share of a second: latency and bandwidth;
- several responses in one cycle: what each adds, also when the link has no pause to recover in;
- many small tensors in one response: what a tensor costs;
- the same in place, for static buckets;
- a backward pass of tiny layers with and without the optimizer's hooks;
- arithmetic and a reduction alone and at once: how much they slow each other down.

Every figure is the median of several calls, a call taking as long as on its slowest rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import msgspec
import numpy as np
import torch
from mpi4py import MPI
from torch import nn

import fusion.torch as hvd
from coordinator.handle import Handle
from coordinator.messages import ITEM_SIZE, OpKind, Region, Request
from coordinator.stats import Stats
from fusion import runtime
from fusion.planning.costs import Buckets, Costs, Curve, Sample, fit
from fusion.runtime import Runtime

SIZES = tuple(64 << exponent for exponent in (0, 3, 6, 8, 10, 12, 14, 16, 18, 20))
"""Bytes: 64 B to 64 MiB."""
_TYPE = "float32"
_WIDE = 4
"""Responses of the experiments with several."""
_MANY = (16, 128)
_SEVERAL = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20)
_LEAST_CALLS = 3
_MOST_CALLS = 60
_SMALL, _LARGE = 1 << 10, 1 << 18
"""Bytes of a response in the experiments with computing beside."""
_MOST_BUSY = 256
_LEAST_COMPUTING_S = 0.03
_TOGETHER_SHARE = 8
"""The experiments with computing beside scatter most, so they take so many times longer."""
_MOST_REPEATS = 9
_FEW = 8
_FEW_LAYERS, _MANY_LAYERS = 16, 256
_SQUARE = 384
_MOST_STRETCH = 20.0
_NARROW, _BROAD = 16, 1 << 14
_WARM_UP = 2
_RESTING_S = 0.02
_CYCLE_MS = 1.0


class Options(msgspec.Struct, frozen=True):
    """How much to measure.

    Attributes:
        experiment_s: about how long the calls of one experiment take in all.
        longest_s: a larger size is not tried when a call of this one takes longer.
        settings: of the runtime, as keywords of `init`.
    """

    experiment_s: float = 0.2
    longest_s: float = 0.1
    settings: dict[str, Any] = {}


class Clock:
    """Times calls together with the other ranks."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Of each, the one of the rank that took longest; the same on all ranks."""
        found = np.array(seconds)
        self.comm.Allreduce(MPI.IN_PLACE, found, op=MPI.MAX)
        times: list[float] = found.tolist()
        return times

    def one(self, call: Callable[[], object]) -> float:
        """Seconds of one call on this rank, begun together."""
        self.comm.Barrier()
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def median(self, call: Callable[[], object], budget_s: float) -> float:
        """Seconds of a call on the slowest rank: the median of as many as fit the budget."""
        self.one(call)
        (estimate,) = self.slowest([self.one(call)])
        calls = max(_LEAST_CALLS, min(_MOST_CALLS, int(budget_s / max(estimate, 1e-9))))
        return median(self.slowest([self.one(call) for _ in range(calls)]))


class _Bench(Clock):
    """What the experiments share: the clock, the options, and a piece of computing."""

    def __init__(self, comm: MPI.Intracomm, options: Options, unit: Callable[[], object]) -> None:
        super().__init__(comm)
        self.options = options
        self._unit = unit
        self._units = max(1, round(_LEAST_COMPUTING_S / self.median(unit, _LEAST_COMPUTING_S)))
        self.span_s = self.median(self.compute, 4 * options.experiment_s)

    def compute(self) -> None:
        """A stretch of computing, of `span_s` if nothing else goes on."""
        for _ in range(self._units):
            self._unit()


def measure(comm: MPI.Intracomm, options: Options, unit: Callable[[], object] | None = None) -> Costs:
    """The costs of these ranks. Collective.

    Args:
        unit: computes as the training will, the backward pass of its model for
            instance; by default a matrix product.

    Raises:
        FusionError: the runtime cannot be started.
        PlanError: the measurements make no sense.
    """
    bench = _Bench(comm, options, unit or _product())
    with _running(options, fusion_threshold_mb=0.0, cycle_time_ms=_CYCLE_MS):
        several = _several(bench)
        small = _together(bench, _dynamic_work, "plan.small", _SMALL)
        large = _together(bench, _dynamic_work, "plan.large", _LARGE)
    with _running(options, cycle_time_ms=_CYCLE_MS) as current:
        copied = [*_sizes(bench, "plan.one", _dynamic_calls), *several, *(_many(bench, n) for n in _MANY)]
        in_place = [*_sizes(bench, "plan.place", _static_calls), *_places(bench)]
        small_in_place = _together(bench, _static_work, "plan.small.place", _SMALL)
        large_in_place = _together(bench, _static_work, "plan.large.place", _LARGE)
        return Costs(
            tuple(len(ranks) for ranks in current.topology.nodes),
            current.config.hierarchy,
            current.config.chunk_kb * 1024,
            _completed(bench, "dynamic", fit(copied), small, large),
            _completed(bench, "static", fit(in_place), small_in_place, large_in_place),
        )


@contextmanager
def _running(options: Options, **settings: Any) -> Iterator[Runtime]:
    """A runtime for some experiments."""
    hvd.init(**{**options.settings, **settings})
    try:
        yield runtime.current()
    finally:
        hvd.shutdown()


Work = list[tuple[Request, list[torch.Tensor]]]
"""What to submit: requests and their tensors."""
Works = Callable[[str, int, int], Work]
Calls = Callable[[str, int, int], Callable[[], object]]
"""(scope, responses, bytes of each) -> what to time."""


def _sizes(bench: _Bench, scope: str, calls: Calls) -> list[Sample]:
    """One response of each size, until that takes too long."""
    samples: list[Sample] = []
    for nbytes in SIZES:
        samples.append(_sample(bench, calls(f"{scope}.{nbytes}", 1, nbytes), 1, 1, nbytes))
        if len(samples) >= 5 and samples[-1].seconds > bench.options.longest_s:
            break
    return samples


def _several(bench: _Bench) -> list[Sample]:
    """Several responses in one cycle: the tensors of a group, with fusion off."""
    samples = []
    for nbytes in _SEVERAL:
        call = _submission(_group_work(f"plan.group.{nbytes}", _WIDE, nbytes))
        samples.append(_sample(bench, call, _WIDE, _WIDE, nbytes))
        if samples[-1].seconds > bench.options.longest_s:
            break
    return samples


def _many(bench: _Bench, number: int) -> Sample:
    """Many tensors of 256 elements in one response."""
    call = _dynamic_calls(f"plan.many{number}", number, 256 * ITEM_SIZE[_TYPE])
    return _sample(bench, call, 1, number, number * 256 * ITEM_SIZE[_TYPE])


def _places(bench: _Bench) -> list[Sample]:
    """Several static buckets in one cycle."""
    samples = []
    for nbytes in _SEVERAL:
        call = _static_calls(f"plan.places.{nbytes}", _WIDE, nbytes)
        samples.append(_sample(bench, call, _WIDE, _WIDE, nbytes))
        if samples[-1].seconds > bench.options.longest_s:
            break
    return samples


def _sample(bench: _Bench, call: Callable[[], object], responses: int, tensors: int, nbytes: int) -> Sample:
    current = runtime.current()
    call()
    before = current.stats()
    seconds = bench.median(call, bench.options.experiment_s)
    done = current.stats().since(before)
    negotiate = _negotiation(done, responses)
    return Sample(responses, tensors, nbytes, seconds, bench.comm.bcast(negotiate, root=0))


def _negotiation(done: Stats, responses: int) -> float:
    """Seconds of negotiation for each call."""
    calls = max(1, done.buffers // responses)
    return done.negotiate_s / calls


def _dynamic_calls(scope: str, number: int, nbytes: int) -> Callable[[], object]:
    return _submission(_dynamic_work(scope, number, nbytes))


def _static_calls(scope: str, number: int, nbytes: int) -> Callable[[], object]:
    return _submission(_static_work(scope, number, nbytes))


def _dynamic_work(scope: str, number: int, nbytes: int) -> Work:
    count = nbytes // ITEM_SIZE[_TYPE]
    work = []
    for index in range(number):
        request = Request(f"{scope}.{index}", OpKind.ALLREDUCE, (_TYPE,), ((count,),))
        work.append((request, [torch.zeros(count)]))
    return work


def _group_work(scope: str, number: int, nbytes: int) -> Work:
    """With fusion off, as many responses in one cycle as the group has tensors."""
    shapes = ((nbytes // ITEM_SIZE[_TYPE],),) * number
    request = Request(scope, OpKind.ALLREDUCE, (_TYPE,) * number, shapes)
    return [(request, [torch.zeros(shape) for shape in shapes])]


def _static_work(scope: str, number: int, nbytes: int) -> Work:
    """Buckets side by side in an arena."""
    count = nbytes // ITEM_SIZE[_TYPE]
    arena = runtime.current().create_arena(number * nbytes).result()
    work = []
    for index in range(number):
        region = Region(arena.number, index * nbytes)
        flat = arena.tensor(index * nbytes, (count,), _TYPE)
        flat.zero_()
        request = Request(f"{scope}.{index}", OpKind.ALLREDUCE, (_TYPE,), ((count,),), region=region)
        work.append((request, [flat]))
    return work


def _begin(work: Work) -> list[Handle]:
    submit = runtime.current().submit
    return [submit(request, tensors, list(tensors)) for request, tensors in work]


def _submission(work: Work) -> Callable[[], object]:
    """Submit everything in place, then wait for everything."""

    def run() -> None:
        for handle in _begin(work):
            handle.result()

    return run


def _completed(
    bench: _Bench, kind: Buckets, curve: Curve, late: tuple[float, float], busy: tuple[float, float]
) -> Curve:
    """A fitted curve with what the thread that trains adds, and what it and the runtime do to each other."""
    few = _hooked(bench, kind, _FEW_LAYERS, _NARROW)
    many = _hooked(bench, kind, _MANY_LAYERS, _NARROW)
    broad = _hooked(bench, kind, _FEW_LAYERS, _BROAD)
    # Differences: what a pass and a settling cost whatever their size, and the reduction in it, drop out.
    more = _MANY_LAYERS - _FEW_LAYERS
    nbytes = _FEW_LAYERS * (_BROAD - _NARROW) * ITEM_SIZE[_TYPE]
    curve = msgspec.structs.replace(
        curve,
        hook_s=max(0.0, many[0] - few[0]) / more,
        hook_s_per_byte=max(0.0, broad[0] - few[0]) / nbytes if kind == "static" else 0.0,
        settle_s=max(0.0, (many[1] - few[1]) / more - curve.tensor_s),
        compute_stretch=busy[0],
        latency_stretch=late[1],
        transfer_stretch=busy[1],
    )
    return bench.comm.bcast(curve, root=0)


def _hooked(bench: _Bench, kind: Buckets, layers: int, width: int) -> tuple[float, float]:
    """Seconds that hooks add to a pass of layers of `width` parameters, and seconds of the settling."""
    plain, hooked = _Scales(layers, width), _Scales(layers, width)
    scope = f"plan.{kind}.{layers}.{width}"
    named = [(f"{scope}.{name}", parameter) for name, parameter in hooked.named_parameters()]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(hooked.parameters(), lr=0.0), named_parameters=named, buckets=kind
    )
    times: list[list[float]] = [[], [], []]
    for _ in range(_WARM_UP + _LEAST_CALLS + 2):
        plain.zero_grad()
        optimizer.zero_grad()
        for model, found in zip((plain, hooked), times, strict=False):
            found.append(bench.one(model().backward))
        time.sleep(_RESTING_S)  # What was submitted is done, so that settling has only its own work.
        times[2].append(bench.one(optimizer.synchronize))
    alone, together, settle = (median(bench.slowest(found)[_WARM_UP:]) for found in times)
    return together - alone, settle


class _Scales(nn.Module):
    """As many parameters as layers, and next to no arithmetic."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(width)) for _ in range(layers)])

    def forward(self) -> torch.Tensor:
        values = torch.ones(len(self.scales[0]))
        for scale in self.scales:
            values = values * scale
        return values.sum()


def _together(bench: _Bench, calls: Works, scope: str, nbytes: int) -> tuple[float, float]:
    """How many times longer computing, and reducing responses of `nbytes`, take when both go on on all ranks.

    As in a training step: after a pause, a stretch of computing begins together with
    more reductions than fit into it, and what was done at its end is compared with what
    either does alone. Long saturation would measure how the scheduler punishes a thread
    that never sleeps.
    """
    alone = bench.median(_submission(calls(f"{scope}.alone", _FEW, nbytes)), 0.0) / _FEW
    number = max(_FEW, min(_MOST_BUSY, int(1.5 * bench.span_s / alone)))
    work = calls(scope, number, nbytes)
    reduce = _submission(work)
    reduce()
    alone = bench.median(reduce, 0.0) / number
    slowdowns, stretches = [], []
    repeats = max(
        _LEAST_CALLS,
        min(
            _MOST_REPEATS, int(_TOGETHER_SHARE * bench.options.experiment_s / (number * alone + bench.span_s))
        ),
    )
    for _ in range(repeats):
        time.sleep(_RESTING_S)
        bench.comm.Barrier()
        ends: list[float] = []
        start = time.perf_counter()
        handles = _begin(work)
        for handle in handles:
            handle.add_done_callback(lambda _, ends=ends: ends.append(time.perf_counter()))  # type: ignore[misc]
        computing = time.perf_counter()
        bench.compute()
        end = time.perf_counter()
        done = [at for at in list(ends) if at <= end]
        for handle in handles:
            handle.result()
        both = (done[-1] if len(done) == number else end) - start
        extra = end - computing - bench.span_s
        # Computing lost `extra` while both went on; what is left is what it got done.
        slowdowns.append(both / max(both - extra, both / _MOST_STRETCH))
        stretches.append(both / (max(len(done), 0.5) * alone))
    slower, longer = median(bench.slowest(slowdowns)), median(bench.slowest(stretches))
    return max(1.0, slower), max(1.0, longer)


def _product() -> Callable[[], object]:
    """Arithmetic that takes milliseconds, as a layer does: shorter pieces would measure the interpreter."""
    matrix = torch.full((_SQUARE, _SQUARE), 1e-3)
    return lambda: torch.mm(matrix, matrix)
