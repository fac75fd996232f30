"""A GPU in host memory: doubles of CuPy, its NCCL and `torch.cuda`, for `fusion.cuda.device.Modules`.

A `Gpu` has streams that run what they are given in order, as soon as the rules
permit: an operation waits for the events its stream was told to wait for, and a
stream can be held, as if its device were slow. So a missing event shows as a wrong
result. Kernels are computed with torch, NCCL's operations go by MPI. Torch's own
operations on device tensors run at once, after what their stream had been given.

Every call is noted in `calls` and held against the signature of the real thing.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from fusion.cuda.device import Modules
from tests.gpu.compressing_double import CompressingKernel
from tests.gpu.kernel_double import Kernel
from tests.gpu.nccl_double import DEFAULT, Nccl
from tests.gpu.signatures import check


class Call:
    """One call: the dotted path of what was called, and with what."""

    def __init__(self, path: str, args: tuple[Any, ...]) -> None:
        self.path = path
        self.args = args

    def __repr__(self) -> str:
        return f"{self.path}{self.args}"


class Gpu:
    """See the module.

    Attributes:
        calls: in order, of all threads.
        modules: the doubles.
        failure: what `check_async_error` raises, if anything.
    """

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.calls: list[Call] = []
        self.failure: Exception | None = None
        self.refusal: Exception | None = None
        """What making a communicator raises, if anything."""
        self.capturing = False
        self.lock = threading.RLock()
        self._addresses = itertools.count(0x1000)
        self._streams: dict[int, _Queue] = {}
        self._local = threading.local()
        self.add_stream(DEFAULT)
        nccl = Nccl(self)
        self.modules = Modules(_Cupy(self, nccl), nccl, _TorchCuda(self), "cpu")

    def note(self, path: str, *args: Any, **kwargs: Any) -> None:
        """Note a call, and hold it against the real thing."""
        check(path, args, kwargs)
        self.calls.append(Call(path, args))

    def paths(self) -> list[str]:
        """What was called, in order."""
        return [call.path for call in self.calls]

    # Streams.

    def add_stream(self, address: int | None = None) -> int:
        """A new stream."""
        if address is None:
            address = next(self._addresses)
        self._streams[address] = _Queue()
        return address

    @property
    def current(self) -> int:
        """The stream that torch has current on this thread."""
        return int(getattr(self._local, "stream", DEFAULT))

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """Make a stream current for torch on this thread."""
        before, self._local.stream = self.current, stream
        try:
            yield
        finally:
            self._local.stream = before

    def give(self, stream: int, step: Callable[[], object] | _Wait) -> None:
        """Give a stream something to do."""
        with self.lock:
            self._streams[stream].steps.append(step)
            self.run()

    def run(self) -> None:
        """Run what can be run."""
        with self.lock:
            while any(queue.advance() for queue in self._streams.values()):
                pass

    def hold(self, stream: int) -> None:
        """A stream does nothing from now on, until `release`."""
        self._streams[stream].held = True

    def release(self, stream: int) -> None:
        """A held stream goes on."""
        self._streams[stream].held = False
        self.run()

    def finish(self, stream: int) -> None:
        """Wait for a stream, and let go of whatever it waits for."""
        with self.lock:
            while self._streams[stream].steps:
                for queue in self._streams.values():
                    queue.held = False
                self.run()

    def idle(self, stream: int) -> bool:
        """Whether a stream has nothing left to do."""
        return not self._streams[stream].steps


class _Queue:
    """What a stream has still to do."""

    def __init__(self) -> None:
        self.steps: deque[Callable[[], object] | _Wait] = deque()
        self.held = False
        self._busy = False

    def advance(self) -> bool:
        """Do what can be done; whether anything was."""
        done = False
        while self.steps and not self.held and not self._busy:
            step = self.steps[0]
            if isinstance(step, _Wait):
                if not step.over():
                    break
            else:
                self._busy = True
                try:
                    step()
                finally:
                    self._busy = False
            self.steps.popleft()
            done = True
        return done


class _Wait:
    """Waits for what an event was recorded for when the wait was given."""

    def __init__(self, event: _Event) -> None:
        self._event = event
        self._ticket = event.recorded

    def over(self) -> bool:
        return self._event.fired >= self._ticket


class _Event:
    def __init__(self, gpu: Gpu, address: int) -> None:
        self._gpu = gpu
        self.ptr = address
        self.recorded = self.fired = 0

    @property
    def done(self) -> bool:
        self._gpu.run()
        return self.fired >= self.recorded


class _Cupy:
    def __init__(self, gpu: Gpu, nccl: Nccl) -> None:
        self._gpu = gpu
        self.cuda = _CupyCuda(gpu, nccl)

    def RawModule(self, **kwargs: Any) -> _Module:  # noqa: N802 - CuPy's name
        self._gpu.note("cupy.RawModule", **kwargs)
        return _Module(self._gpu, kwargs["options"])


class _CupyCuda:
    def __init__(self, gpu: Gpu, nccl: Nccl) -> None:
        self._gpu = gpu
        self.nccl = nccl
        self.events: dict[int, _Event] = {}
        self.runtime = _Runtime(gpu, self.events)
        self._local = threading.local()

    @property
    def current(self) -> int:
        return int(getattr(self._local, "stream", DEFAULT))

    def get_current_stream(self, device_id: int) -> Any:
        self._gpu.note("cupy.cuda.get_current_stream", device_id)
        return _Address(self.current)

    def Device(self, index: int) -> _Device:  # noqa: N802
        self._gpu.note("cupy.cuda.Device", index)
        return _Device(self._gpu, index)

    def Stream(self, **kwargs: Any) -> _Stream:  # noqa: N802
        self._gpu.note("cupy.cuda.Stream", **kwargs)
        return _Stream(self._gpu, self, self._gpu.add_stream())

    def Event(self, **kwargs: Any) -> _Event:  # noqa: N802
        self._gpu.note("cupy.cuda.Event", **kwargs)
        event = _Event(self._gpu, 0xE000_0000 + len(self.events))
        self.events[event.ptr] = event
        return event

    def alloc(self, size: int) -> _Pointer:
        self._gpu.note("cupy.cuda.alloc", size)
        return _Pointer(self._gpu, size)

    def alloc_pinned_memory(self, size: int) -> _Pinned:
        self._gpu.note("cupy.cuda.alloc_pinned_memory", size)
        return _pinned(size)


class _Address:
    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


class _Device:
    def __init__(self, gpu: Gpu, index: int) -> None:
        self._gpu = gpu
        self.pci_bus_id = f"0000:{index:02x}:00.0"

    def use(self) -> None:
        self._gpu.note("cupy.cuda.Device.use")

    def __enter__(self) -> None:
        self._gpu.note("cupy.cuda.Device.__enter__")

    def __exit__(self, *args: object) -> None:
        self._gpu.note("cupy.cuda.Device.__exit__", *args)


class _Stream:
    def __init__(self, gpu: Gpu, cuda: _CupyCuda, ptr: int) -> None:
        self._gpu = gpu
        self._cuda = cuda
        self.ptr = ptr

    def use(self) -> None:
        self._gpu.note("cupy.cuda.Stream.use")
        self._cuda._local.stream = self.ptr

    def synchronize(self) -> None:
        self._gpu.note("cupy.cuda.Stream.synchronize")
        self._gpu.finish(self.ptr)


class _Runtime:
    memcpyDefault = 4  # noqa: N815

    def __init__(self, gpu: Gpu, events: dict[int, _Event]) -> None:
        self._gpu = gpu
        self._events = events

    def getDevice(self) -> int:  # noqa: N802
        self._gpu.note("cupy.cuda.runtime.getDevice")
        return self._gpu.index

    def streamSynchronize(self, stream: int) -> None:  # noqa: N802
        self._gpu.note("cupy.cuda.runtime.streamSynchronize", stream)
        self._gpu.finish(stream)

    def eventRecord(self, event: int, stream: int) -> None:  # noqa: N802
        self._gpu.note("cupy.cuda.runtime.eventRecord", event, stream)
        found = self._events[event]
        found.recorded += 1
        ticket = found.recorded

        def fire() -> None:
            found.fired = ticket

        self._gpu.give(stream, fire)

    def streamWaitEvent(self, stream: int, event: int) -> None:  # noqa: N802
        self._gpu.note("cupy.cuda.runtime.streamWaitEvent", stream, event)
        self._gpu.give(stream, _Wait(self._events[event]))

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:  # noqa: N802
        self._gpu.note("cupy.cuda.runtime.memcpyAsync", dst, src, size, kind, stream)
        self._gpu.give(stream, lambda: ctypes.memmove(dst, src, size))


class _Pointer:
    """Device memory; what it holds at first is no number."""

    def __init__(self, gpu: Gpu, size: int) -> None:
        self._gpu = gpu
        # On a 64-byte line, as device memory is on more.
        self._memory = np.full(size + 64, 0xFF, np.uint8)
        self.ptr = -(-self._memory.ctypes.data // 64) * 64

    def copy_from_host_async(self, mem: int, size: int, stream: _Stream) -> None:
        self._gpu.note("cupy.cuda.MemoryPointer.copy_from_host_async", mem, size, stream)
        self._gpu.give(stream.ptr, lambda: ctypes.memmove(self.ptr, mem, size))


class _Pinned(np.ndarray):
    """Pinned memory has an address and the buffer interface."""

    @property
    def ptr(self) -> int:
        return int(self.ctypes.data)


def _pinned(size: int) -> _Pinned:
    return np.full(size, 0xFF, np.uint8).view(_Pinned)


class _Module:
    def __init__(self, gpu: Gpu, options: Sequence[str]) -> None:
        self._gpu = gpu
        defines = dict(option[2:].split("=") for option in options if option.startswith("-D"))
        self._kernel: Any = CompressingKernel()
        if defines:
            self._kernel = Kernel({name: int(value) for name, value in defines.items()})

    def get_function(self, name: str) -> Callable[..., None]:
        self._gpu.note("cupy.RawModule.get_function", name)

        def launch(grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
            self._gpu.note("cupy.RawKernel.__call__", grid, block, args)
            run = getattr(self._kernel, name)
            stream = self._gpu.modules.cupy.cuda.current
            assert stream != DEFAULT, (
                "a kernel was launched on a thread that has not made the side stream current"
            )
            self._gpu.give(stream, lambda: run(grid[0], *args))

        return launch


class _TorchCuda:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def current_device(self) -> int:
        self._gpu.note("torch.cuda.current_device")
        return self._gpu.index

    def current_stream(self, device: int) -> Any:
        self._gpu.note("torch.cuda.current_stream", device)
        return _TorchStream(self._gpu.current)

    def is_current_stream_capturing(self) -> bool:
        self._gpu.note("torch.cuda.is_current_stream_capturing")
        return self._gpu.capturing

    def ExternalStream(self, stream_ptr: int, device: int) -> Any:  # noqa: N802
        self._gpu.note(
            "torch.cuda.ExternalStream.__new__", torch.cuda.ExternalStream, stream_ptr, device=device
        )
        return _TorchStream(stream_ptr)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        """What torch does inside happens at once: what the stream had been given before comes first."""
        self._gpu.note("torch.cuda.stream", stream)
        self._gpu.finish(stream.cuda_stream)
        with self._gpu.on(stream.cuda_stream):
            yield


class _TorchStream:
    def __init__(self, cuda_stream: int) -> None:
        self.cuda_stream = cuda_stream
