"""What every collective is given: the means it runs with, and the response it runs.

`Means` is made once by the executor; a `Job` once for each executed response.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from coordinator.executor import Entry
from coordinator.messages import Response
from coordinator.waiting import Waiter
from fusion.arena import Arena
from fusion.arithmetic import Arithmetic, Scratch
from fusion.channel import Channel
from fusion.collectives.node import NodeBuffer
from fusion.collectives.pipeline import Operation, Pipeline
from fusion.packing import Layout, Tensors
from fusion.topology import Topology


class Recorder(Protocol):
    """Where phases and their times are reported."""

    def span(self, phase: str, names: Sequence[str], start: float, stop: float, nbytes: int) -> None:
        """Note one phase; times are `time.monotonic()` seconds."""
        ...

    def compressed(self, nbytes: int, payload: int) -> None:
        """Note that tensors of `nbytes` were moved as `payload` bytes."""
        ...


@dataclass(frozen=True)
class Means:
    """What a collective works with; one set for the life of the runtime.

    Attributes:
        node: staging memory of the ranks that combine on this node.
        buffer_bytes: most bytes of a response that are between nodes at once.
        arenas: by number.
        pipeline: of ring operations under way.
    """

    topology: Topology
    waiter: Waiter
    recorder: Recorder
    world: Channel
    cross: Channel
    node: NodeBuffer
    scratch: Scratch
    buffer_bytes: int
    segment_bytes: int
    arenas: dict[int, Arena]
    pipeline: Pipeline

    def arithmetic(self, response: Response) -> Arithmetic:
        """The numeric rules of a response. Raises ValueError, alike on all ranks."""
        request = response.first
        return Arithmetic(
            request.op,
            response.dtype,
            self.topology.size,
            prescale=request.prescale,
            postscale=request.postscale,
            scratch=self.scratch,
        )

    @contextmanager
    def phase(self, phase: str, names: Sequence[str], nbytes: int) -> Iterator[None]:
        """Report how long the body takes."""
        start = time.monotonic()
        yield
        self.recorder.span(phase, names, start, time.monotonic(), nbytes)


class Job:
    """One execution of a response.

    Attributes:
        last: what was left under way, if anything; with its end all outputs are complete.
    """

    def __init__(self, response: Response, layout: Layout, entries: Sequence[Entry]) -> None:
        self.response = response
        self.layout = layout
        self.entries = entries
        self.last: Operation | None = None

    @cached_property
    def tensors(self) -> Tensors:
        """The inputs and outputs, one of each for each part."""
        return Tensors(self.layout, self.entries)

    @property
    def name(self) -> str:
        """Of a response with the parts of one request."""
        return self.response.first.name

    def only_input(self) -> torch.Tensor:
        """The input of a response that has one part, contiguous."""
        return self.tensors.inputs[0].contiguous()

    def set_output(self, output: torch.Tensor) -> None:
        """The result of a response that has one part."""
        outputs, index = self.entries[0].outputs, self.response.parts[0].index
        if outputs[index] is None:
            outputs[index] = output
        else:
            outputs[index].copy_(output)


Collective = Callable[[Job], None]
"""Runs a job: all outputs are complete when it returns, or with the operation that it left as `job.last`."""
