"""What the collectives on devices are given; the counterpart of `job.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from coordinator.executor import Entry
from coordinator.messages import Response
from coordinator.waiting import Waiter
from fusion.channel import Channel
from fusion.collectives.nccl import Communicator
from fusion.cuda.copying import Copier
from fusion.cuda.device import Device, Memory
from fusion.cuda.rules import Rules, rules_of
from fusion.packing import Layout, Tensors
from fusion.topology import Topology


@dataclass
class DeviceMeans:
    """What a collective on devices works with; one set for the life of the executor.

    Attributes:
        comm: all ranks, or those of the node where NCCL does not reach further.
        world: all ranks, by MPI.
        cross: this rank's counterparts on the other nodes, by MPI.
        buffer_bytes: size of the fusion buffer.
        exact: see `fusion.cuda.rules`.
    """

    device: Device
    topology: Topology
    waiter: Waiter
    comm: Communicator
    world: Channel
    cross: Channel
    buffer_bytes: int
    exact: bool
    _buffer: Memory | None = None
    _copiers: dict[Rules, Copier] = field(default_factory=dict)

    @property
    def buffer(self) -> int:
        """The address of the fusion buffer, which is made when it is first needed."""
        if self._buffer is None:
            self._buffer = self.device.memory(self.buffer_bytes)
        return self._buffer.ptr

    @property
    def held_bytes(self) -> int:
        """What the fusion buffer takes so far."""
        return 0 if self._buffer is None else self.buffer_bytes

    def rules(self, response: Response) -> Rules:
        """The numeric rules of a reduction. Raises ValueError, alike on all ranks."""
        return rules_of(response.first, response.dtype, self.topology.size, exact=self.exact)

    def copier(self, rules: Rules) -> Copier:
        """The kernels for values of one kind."""
        copier = self._copiers.get(rules)
        if copier is None:
            copier = self._copiers[rules] = Copier(self.device, rules)
        return copier


class DeviceJob:
    """One execution of a response on the device.

    Attributes:
        kept: what must stay until the device is done.
    """

    def __init__(self, response: Response, layout: Layout, entries: Sequence[Entry]) -> None:
        self.response = response
        self.layout = layout
        self.entries = entries
        tensors = Tensors(layout, entries)
        self.inputs, self.outputs = tensors.inputs, tensors.outputs
        self.kept: list[Any] = [self.inputs, self.outputs]
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def name(self) -> str:
        """Of a response with the parts of one request."""
        return self.response.first.name

    @property
    def in_place(self) -> bool:
        """Whether every output is its input."""
        return all(a is b for a, b in zip(self.inputs, self.outputs, strict=True))

    def sources(self, device: Device) -> list[torch.Tensor]:
        """The inputs, contiguous."""
        if all(map(torch.Tensor.is_contiguous, self.inputs)):
            return self.inputs
        with device.on_side():
            made = [tensor.contiguous() for tensor in self.inputs]
        self.kept.append(made)
        return made

    def targets(self, device: Device) -> list[torch.Tensor]:
        """Contiguous memory for the outputs; `flush` copies to those that are not."""
        if all(map(torch.Tensor.is_contiguous, self.outputs)):
            return self.outputs
        made = []
        for output in self.outputs:
            target = output
            if not output.is_contiguous():
                with device.on_side():
                    target = torch.empty(output.shape, dtype=output.dtype, device=output.device)
                self._copies.append((output, target))
            made.append(target)
        self.kept.append(made)
        return made

    def flush(self, device: Device) -> None:
        """Complete the outputs that were written through a copy."""
        if self._copies:
            with device.on_side():
                for output, copy in self._copies:
                    output.copy_(copy)

    def set_output(self, device: Device, output: torch.Tensor) -> None:
        """The result of a response that has one part."""
        outputs, index = self.entries[0].outputs, self.response.parts[0].index
        self.kept.append(output)
        if outputs[index] is None:
            outputs[index] = output
        else:
            with device.on_side():
                outputs[index].copy_(output)

    def new_output(self, device: Device, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory for a result, which the stream that the caller submitted on may use afterwards."""
        ready = self.entries[0].ready
        stream = ready[0].stream if ready else device.side
        return device.empty(shape, dtype, stream)


DeviceCollective = Callable[[DeviceJob], None]
"""Gives a job to the side stream. Returns before the device has run it."""
