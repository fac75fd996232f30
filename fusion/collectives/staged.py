"""Any collective on devices through host memory: copied down, run by the host's data plane, copied up.

For what NCCL cannot do: Adasum, compression of most kinds, ranks that share a GPU, and
everything but an all-reduce between nodes that NCCL does not reach. The cycle thread waits for the
copy down, since MPI knows nothing of streams; it polls, so that the failure of
another rank is noticed.

Cost for S bytes: S copied down and S up, beside what the host's algorithm costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import torch

from coordinator.executor import Entry, Executor
from coordinator.messages import Part, Response
from coordinator.waiting import Waiter
from fusion.collectives.device_job import DeviceJob
from fusion.cuda.device import Device

NewOutput = Callable[[DeviceJob, Device, Sequence[int], torch.dtype], torch.Tensor]


class Staged:
    """See the module.

    Args:
        device: of the tensors.
        host: runs responses for tensors in host memory.
        waiter: asks, while the copy is under way, whether a rank has failed.
    """

    def __init__(self, device: Device, host: Executor, waiter: Waiter) -> None:
        self._device = device
        self._host = host
        self._waiter = waiter

    def __call__(self, job: DeviceJob) -> None:
        response = _on_host(job)
        inputs = [self._pinned(tensor) for tensor in job.inputs]
        with self._device.on_side():
            for host, tensor in zip(inputs, job.inputs, strict=True):
                host.copy_(tensor, non_blocking=True)
        event = self._device.record()
        self._waiter.until(lambda: self._device.passed(event))
        entries = [
            _entry(part, entry, host, output)
            for part, entry, host, output in zip(
                response.parts, job.entries, inputs, job.outputs, strict=True
            )
        ]
        work = self._host.execute(response, entries)
        if work is not None:
            self._waiter.until(work.done)
        for index, (part, entry) in enumerate(zip(response.parts, entries, strict=True)):
            self._bring_back(job, index, entry.outputs[part.index], entry.outputs[len(part.request.shapes) :])

    def _bring_back(
        self, job: DeviceJob, index: int, result: torch.Tensor, more: Sequence[torch.Tensor]
    ) -> None:
        part, entry = job.response.parts[index], job.entries[index]
        pinned = self._pinned(result)
        pinned.copy_(result)
        output: torch.Tensor | None = job.outputs[index]
        if output is None:
            output = entry.outputs[part.index] = job.new_output(self._device, result.shape, result.dtype)
        if more:
            entry.outputs.extend(more)
        with self._device.on_side():
            output.copy_(pinned, non_blocking=True)
        job.kept += [output, pinned]

    def _pinned(self, like: torch.Tensor) -> torch.Tensor:
        """Contiguous host memory for a tensor's values."""
        memory = self._device.pinned(like.numel() * like.element_size())
        return memory.view(like.dtype).view(like.shape)


def _on_host(job: DeviceJob) -> Response:
    """The response without its place on the device; kept, since the host tells responses by identity."""
    found: Response | None = job.layout.kept.get("host")
    if found is None:
        first = job.response.first
        found = job.response
        if first.region is not None:
            request = msgspec.structs.replace(first, region=None)
            found = Response(found.kind, found.dtype, (Part(request, 0),))
        job.layout.kept["host"] = found
    return found


def _entry(part: Part, entry: Entry, host: torch.Tensor, output: torch.Tensor | None) -> Entry:
    """An entry of host tensors, which only has the one tensor that this part is about."""
    count = len(part.request.shapes)
    inputs: list[torch.Tensor | None] = [None] * count
    outputs: list[torch.Tensor | None] = [None] * count
    inputs[part.index] = host
    outputs[part.index] = None if output is None else torch.empty(output.shape, dtype=output.dtype)
    return Entry(part.request, inputs, outputs, entry.handle, entry.enqueued_at, entry.extra)
