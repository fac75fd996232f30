"""Workloads from files: a list of tensors, or a timeline that the runtime wrote.

A list is JSON:

    [{"name": "fc.weight", "shape": [1000, 2048], "dtype": "float32", "ready_ms": 3.2}, ...]

`ready_ms` counts from the beginning of the backward pass and may be left out
(ready at once). A timeline (`timeline:` in YAML, `hvd.start_timeline`) says when
each tensor was submitted. Its step is the median over all recorded steps but
the first, in which tensors are negotiated in full. Times count from the step's
first gradient, because the runtime sees nothing of the pass before that; sizes are
in bytes there, so every dtype is taken for float32.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from math import prod
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import msgspec

from fusion.planning.workload import PlanError, Tensor, Workload, make

_ASSUMED = "float32"
_ASSUMED_BYTES = 4


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    dtype: str
    ready_ms: Annotated[float, msgspec.Meta(ge=0)] = 0.0


def read(path: str) -> Workload:
    """The workload in a file of either kind.

    Raises:
        PlanError: the file cannot be read, is neither, or describes no step; says where.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: the trace cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise PlanError(f"{path}:{error.lineno}: this is not JSON: {error.msg}") from error
    name = Path(path).name
    if isinstance(found, list) and any(isinstance(line, dict) and "ph" in line for line in found):
        return of_timeline(name, found)
    return of_list(name, found)


def of_list(name: str, lines: Any) -> Workload:
    """The workload of a list; see the module.

    Raises:
        PlanError: it is not such a list.
    """
    try:
        checked = msgspec.convert(lines, list[_Line])
    except msgspec.ValidationError as error:
        raise PlanError(
            f"{name}: {error}. A trace is a list of objects with name, shape, dtype and ready_ms"
        ) from None
    return make(
        name, [Tensor(line.name, prod(line.shape), line.dtype, line.ready_ms / 1e3) for line in checked]
    )


def of_timeline(name: str, events: list[dict[str, Any]]) -> Workload:
    """The workload of a timeline; see the module.

    Raises:
        PlanError: no tensor was submitted twice, so there is no whole step.
    """
    submissions = _submissions(events)
    counts = Counter(len(times) for times in submissions.values() if len(times) > 1)
    if not counts:
        raise PlanError(
            f"{name}: the timeline holds no repeated step: record two steps or more, and a larger "
            "timeline_max_mb if it was full"
        )
    # What is reduced equally often belongs to the step; broadcasts at the start and metrics do not.
    steps = max(counts, key=lambda count: (counts[count], count))
    members = {tensor: times for tensor, times in submissions.items() if abs(len(times) - steps) <= 1}
    complete = min(len(times) for times in members.values())
    starts = [min(times[step][0] for times in members.values()) for step in range(complete)]
    tensors = []
    for tensor, times in members.items():
        ready = median(times[step][0] - starts[step] for step in range(min(1, complete - 1), complete))
        tensors.append(Tensor(tensor, -(-times[-1][1] // _ASSUMED_BYTES), _ASSUMED, max(ready, 0.0) / 1e6))
    return make(name, tensors)


def _submissions(events: list[dict[str, Any]]) -> dict[str, list[tuple[float, int]]]:
    """Name -> when it was submitted, in microseconds, and its bytes."""
    names = {
        event["tid"]: event["args"]["name"]
        for event in events
        if event.get("ph") == "M" and event.get("name") == "thread_name"
    }
    found = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event.get("name") == "queued" and event["tid"] in names:
            found[names[event["tid"]]].append((float(event["ts"]), int(event["args"]["bytes"])))
    return {name: sorted(times) for name, times in found.items()}


def stretched(workload: Workload, backward_s: float) -> Workload:
    """The workload with its last tensor ready at the end of a backward pass of `backward_s`.

    Raises:
        PlanError: its tensors span a longer time than that.
    """
    late = backward_s - workload.tensors[-1].ready_s
    if late < 0:
        raise PlanError(
            f"the tensors of {workload.name} are ready over {workload.tensors[-1].ready_s * 1e3:g} ms, "
            f"longer than the backward pass of {backward_s * 1e3:g} ms that was given"
        )
    tensors = [msgspec.structs.replace(tensor, ready_s=tensor.ready_s + late) for tensor in workload.tensors]
    return make(workload.name, tensors, forward_s=workload.forward_s, backward_s=backward_s)
