"""The narrow interface to one GPU: everything the data plane asks of CuPy and `torch.cuda` is asked here.

`Device` is made on the cycle thread. `mark`, `join` and `capturing` are called
on any thread; everything else on the cycle thread. The modules come in as
arguments, so that tests pass doubles whose calls are held against the real ones.

All work of the runtime goes to one side stream, in the order of the calls. No
call here waits for the GPU, except `synchronize`.
"""

from __future__ import annotations

import importlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

THREADS = 256
"""Threads of a block, in every kernel."""
OPTIONS = ("-std=c++17",)


class Modules(NamedTuple):
    """What a device is driven with."""

    cupy: Any
    nccl: Any
    torch_cuda: Any
    kind: str = "cuda"
    """`torch.device` type of its tensors; a double's tensors are in host memory."""


def load_modules() -> Modules:
    """The real ones. Raises ImportError."""
    return Modules(
        importlib.import_module("cupy"), importlib.import_module("cupy.cuda.nccl"), torch.cuda, "cuda"
    )


class Mark(NamedTuple):
    """A point in the work of a stream.

    Marks of one stream that have a higher number are later.
    """

    stream: int
    number: int
    event: Any


class Memory:
    """Device memory. It may be dropped while the side stream uses it: it is reused in that stream's order.

    Attributes:
        ptr: address.
        nbytes: size.
    """

    def __init__(self, pointer: Any, nbytes: int) -> None:
        self.pointer = pointer
        self.ptr: int = int(pointer.ptr)
        self.nbytes = nbytes


class Marker:
    """Marks and joins the streams of callers' threads; the part of a device that needs no side stream."""

    def __init__(self, modules: Modules, index: int) -> None:
        self.index = index
        self._modules = modules
        self._cuda = modules.cupy.cuda
        self._runtime = modules.cupy.cuda.runtime
        self._torch_cuda = modules.torch_cuda
        self._numbers = itertools.count()
        self.torch_device = torch.device(f"cuda:{index}" if modules.kind == "cuda" else modules.kind)
        """Of its tensors."""

    def mark(self, stream: int | None = None) -> Mark:
        """Everything that a stream, by default this thread's current torch stream, has been given so far."""
        if stream is None:
            stream = self.current_stream()
        number = next(self._numbers)
        return Mark(stream, number, self._record(stream))

    def join(self, event: Any) -> None:
        """What this thread gives to its current streams, torch's and CuPy's, comes after the event."""
        stream = self.current_stream()
        self._runtime.streamWaitEvent(stream, event.ptr)
        cupys = self._cuda.get_current_stream(self.index).ptr
        if cupys != stream:
            self._runtime.streamWaitEvent(cupys, event.ptr)

    def capturing(self) -> bool:
        """Whether this thread's current stream is being captured into a CUDA graph."""
        return bool(self._torch_cuda.is_current_stream_capturing())

    def current_stream(self) -> int:
        """The address of this thread's current torch stream."""
        return int(self._torch_cuda.current_stream(self.index).cuda_stream)

    def _record(self, stream: int) -> Any:
        if self._runtime.getDevice() != self.index:  # The current device is a thread's own.
            with self._cuda.Device(self.index):
                return self._new_event(stream)
        return self._new_event(stream)

    def _new_event(self, stream: int) -> Any:
        event = self._cuda.Event(disable_timing=True)
        self._runtime.eventRecord(event.ptr, stream)
        return event


class Device:
    """One GPU, driven by the cycle thread.

    Attributes:
        marker: what callers' threads use.
        nccl: the module.
        torch_device: of its tensors.
    """

    def __init__(self, marker: Marker, modules: Modules) -> None:
        self.marker = marker
        self.index = marker.index
        self.nccl = modules.nccl
        self._cupy = modules.cupy
        self._cuda = modules.cupy.cuda
        self._runtime = modules.cupy.cuda.runtime
        self._torch_cuda = modules.torch_cuda
        self.torch_device = marker.torch_device
        self._thread = 0
        self._functions: dict[tuple[str, str, tuple[str, ...]], Any] = {}
        with self._cuda.Device(self.index):
            self._side = self._cuda.Stream(non_blocking=True)
        self._torch_side: Any = None
        self.use()

    @property
    def side(self) -> int:
        """The address of the side stream."""
        return int(self._side.ptr)

    @property
    def identity(self) -> str:
        """The same for two processes exactly when they have the same GPU of a node."""
        return str(self._cuda.Device(self.index).pci_bus_id)

    def use(self) -> None:
        """Make this device and its side stream current on this thread, for CuPy and the CUDA runtime."""
        if self._thread != threading.get_ident():
            self._thread = threading.get_ident()
            self._cuda.Device(self.index).use()
            self._side.use()

    def use_elsewhere(self) -> None:
        """Make this device current on another thread than the cycle thread."""
        self._cuda.Device(self.index).use()

    # Order.

    def wait_for(self, marks: Sequence[Mark]) -> None:
        """What the side stream is given from now on comes after these marks."""
        latest: dict[int, Mark] = {}
        for mark in marks:
            known = latest.get(mark.stream)
            if known is None or known.number < mark.number:
                latest[mark.stream] = mark
        for mark in latest.values():
            self._runtime.streamWaitEvent(self._side.ptr, mark.event.ptr)

    def record(self) -> Any:
        """An event after everything given to the side stream so far."""
        event = self._cuda.Event(disable_timing=True)
        self._runtime.eventRecord(event.ptr, self._side.ptr)
        return event

    def passed(self, event: Any) -> bool:
        """Whether the work before an event is complete. Raises what CUDA says if it failed."""
        return bool(event.done)

    def synchronize(self) -> None:
        """Wait until the side stream has nothing left to do. Not for the hot path."""
        self._side.synchronize()

    @contextmanager
    def on_side(self) -> Iterator[None]:
        """What torch does inside goes to the side stream."""
        if self._torch_side is None:
            self._torch_side = self._torch_cuda.ExternalStream(self._side.ptr, device=self.index)
        with self._torch_cuda.stream(self._torch_side):
            yield

    def keep_for_side(self, tensors: Sequence[torch.Tensor]) -> None:
        """Tensors may be dropped now, though the side stream still uses them."""
        with self.on_side():
            stream = self._torch_cuda.current_stream(self.index)
            for tensor in tensors:
                if tensor.device.type == "cuda":
                    tensor.record_stream(stream)

    # Memory.

    def memory(self, nbytes: int) -> Memory:
        """Device memory for the side stream."""
        return Memory(self._cuda.alloc(max(nbytes, 1)), nbytes)

    def zeros(self, nbytes: int) -> torch.Tensor:
        """A new tensor of zero bytes, for any stream: the host waits for it. Not for the hot path."""
        made = torch.zeros(nbytes, dtype=torch.uint8, device=self.torch_device)
        self._runtime.streamSynchronize(self.marker.current_stream())
        return made

    def upload(self, values: npt.NDArray[Any], into: Memory) -> Any:
        """Copy an array to device memory; what is returned must be kept until that is done."""
        pinned = self._cuda.alloc_pinned_memory(max(values.nbytes, 1))
        np.frombuffer(pinned, values.dtype, values.size)[:] = values.reshape(-1)
        into.pointer.copy_from_host_async(pinned.ptr, values.nbytes, self._side)
        return pinned

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Copy between two addresses, each on the device or in pinned host memory."""
        self._runtime.memcpyAsync(to, source, nbytes, self._runtime.memcpyDefault, self._side.ptr)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Bytes of host memory that the device can copy to and from."""
        memory = self._cuda.alloc_pinned_memory(max(nbytes, 1))
        return torch.from_numpy(np.frombuffer(memory, np.uint8, nbytes))

    def empty(self, shape: Sequence[int], dtype: torch.dtype, stream: int) -> torch.Tensor:
        """A new tensor of the device, for the side stream and then for a stream of a caller, by its address.

        It is made of memory of the side stream: that of the caller's may have been freed by the host
        while the device still has something to do with it.
        """
        with self.on_side():
            made = torch.empty(tuple(shape), dtype=dtype, device=self.torch_device)
        if made.is_cuda:
            made.record_stream(self._torch_cuda.ExternalStream(stream, device=self.index))
        return made

    # Kernels.

    def function(self, source: str, name: str, defines: Sequence[str] = ()) -> Any:
        """A kernel, compiled when it is first asked for.

        Args:
            source: CUDA C++.
            name: of an `extern "C"` function in it.
            defines: options such as "-DACC=8".
        """
        key = (source, name, tuple(defines))
        found = self._functions.get(key)
        if found is None:
            module = self._cupy.RawModule(code=source, options=(*OPTIONS, *defines))
            found = self._functions[key] = module.get_function(name)
        return found

    def launch(self, function: Any, blocks: int, arguments: Sequence[Any]) -> None:
        """Run a kernel on the side stream, with integers as addresses or 64-bit numbers."""
        if blocks:
            function((blocks,), (THREADS,), tuple(arguments))
