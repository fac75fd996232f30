"""Routes responses to the data plane of their device: host memory, or this rank's GPU.

`Devices` is an executor, used on the cycle thread, except for `mark`, which
callers' threads use when they submit tensors on a GPU. What concerns GPUs is made
when the first such tensor comes: a job on CPUs never imports CuPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import Protocol

import torch

from coordinator.errors import FusionError
from coordinator.executor import Entry, Executor, Work
from coordinator.handle import Handle
from coordinator.messages import Request, Response
from coordinator.waiting import Waiter
from fusion.absent import absent_entry
from fusion.channel import Channel
from fusion.collectives.job import Recorder
from fusion.cuda.device import Device, Mark, Marker, Modules, load_modules
from fusion.cuda.present import missing
from fusion.cuda_executor import CudaExecutor
from fusion.memory import MemoryReport
from fusion.topology import Topology

_MIB = 1 << 20


class DevicesConfig(Protocol):
    """The settings that concern devices; `fusion.config.Config` has them."""

    @property
    def gpu(self) -> str: ...
    @property
    def gpu_sums(self) -> str: ...
    @property
    def fusion_threshold_mb(self) -> float: ...
    @property
    def ring_segment_kb(self) -> int: ...


class Devices:
    """Implements `coordinator.executor.Executor` for tensors wherever they are.

    Args:
        host: for tensors in host memory.
        load: the libraries; raises ImportError.
        lacking: why GPUs cannot be used, or None.

    Raises:
        FusionError: `gpu` names a way that cannot be had here; alike on all ranks.
    """

    def __init__(
        self,
        host: Executor,
        topology: Topology,
        waiter: Waiter,
        recorder: Recorder,
        config: DevicesConfig,
        *,
        load: Callable[[], Modules] | None = None,
        lacking: Callable[[], str | None] | None = None,
    ) -> None:
        self._host = host
        self._topology = topology
        self._waiter = waiter
        self._recorder = recorder
        self._config = config
        self._load = load or load_modules
        self._lacking = lacking or missing
        self._lock = Lock()
        self._modules: Modules | None = None
        self._marker: Marker | None = None
        self._cuda: CudaExecutor | None = None
        if config.gpu in ("nccl", "hierarchical"):
            reason = self._lacking()
            error = None
            if reason is not None:
                error = (
                    f'gpu="{config.gpu}" was asked for, but rank {topology.rank} cannot use a GPU: {reason}. '
                    'gpu="auto" runs without one'
                )
            Channel(topology.world, waiter).agree(error)

    # On callers' threads.

    def mark(self, tensors: Sequence[torch.Tensor], name: str) -> tuple[Mark, ...]:
        """When these tensors of a device may be read: after what this thread's current stream has been given.

        Raises:
            FusionError: GPUs cannot be used here, or a CUDA graph is being captured.
            ValueError: the tensors are not on the device of this rank.
        """
        marker = self._marker
        if marker is None:
            marker = self._first(tensors, name)
        for tensor in tensors:
            if tensor.get_device() not in (marker.index, -1):
                raise ValueError(
                    f"'{name}' is on {tensor.device}, but this rank's GPU is cuda:{marker.index}, where its "
                    "first tensor was: call torch.cuda.set_device(hvd.local_rank()) before any tensor is made"
                )
        if marker.capturing():
            raise FusionError(
                f"'{name}' was submitted while a CUDA graph is being captured: a reduction is negotiated "
                "with the other ranks each time, which a graph cannot do. Capture forward and backward "
                "without it, and reduce between replays"
            )
        return (marker.mark(),)

    def stream(self) -> int:
        """The current stream of the calling thread, of a job that has submitted to a device before."""
        assert self._marker is not None
        return self._marker.current_stream()

    def marks(self, streams: Iterable[int]) -> list[Mark]:
        """What these streams have been given so far."""
        assert self._marker is not None
        return [self._marker.mark(stream) for stream in streams]

    def _first(self, tensors: Sequence[torch.Tensor], name: str) -> Marker:
        """Choose this rank's device: that of its first tensor, or the one torch has current."""
        with self._lock:
            if self._marker is not None:
                return self._marker
            reason = self._lacking()
            if reason is not None:
                raise FusionError(
                    f"'{name}' is on a GPU, which cannot be used: {reason}. Or pass tensor.cpu()"
                )
            modules = self._load()
            index = tensors[0].get_device() if tensors else -1
            if index < 0:  # No tensor, or that of a double, which is in host memory.
                index = int(modules.torch_cuda.current_device())
            self._modules = modules
            self._marker = Marker(modules, index)
            return self._marker

    def memory(self) -> MemoryReport:
        """What this rank's GPU holds for the runtime; on any thread."""
        return MemoryReport() if self._cuda is None else self._cuda.memory()

    # On the cycle thread.

    def execute(self, response: Response, entries: Sequence[Entry]) -> Work | None:
        """Run one response, or give it to the device; see `coordinator.executor.Executor`."""
        if response.first.device == "cpu":
            return self._host.execute(response, entries)
        return self._on_device().execute(response, entries)

    def absent(self, request: Request, handle: Handle) -> Entry:
        """An entry for a rank that has joined; see `coordinator.executor.Executor`."""
        if request.device == "cpu":
            return self._host.absent(request, handle)
        marker = self._first((), request.name)
        entry = absent_entry(request, handle, self._topology.size, marker.torch_device)
        entry.ready = (marker.mark(),)
        return entry

    def close(self) -> None:
        """Give back what both have. Collective."""
        if self._cuda is not None:
            self._cuda.close()
        self._host.close()

    def abort(self) -> None:
        """The runtime has failed: free what the device waits for."""
        if self._cuda is not None:
            self._cuda.abort()
        self._host.abort()

    def _on_device(self) -> CudaExecutor:
        if self._cuda is None:
            marker = self._first((), "a tensor")
            assert self._modules is not None
            self._cuda = CudaExecutor(
                Device(marker, self._modules),
                self._topology,
                self._waiter,
                self._recorder,
                wanted=self._config.gpu,
                exact=self._config.gpu_sums == "float32",
                buffer_bytes=int(self._config.fusion_threshold_mb * _MIB),
                segment_bytes=self._config.ring_segment_kb * 1024,
                host=self._host,
            )
        return self._cuda
