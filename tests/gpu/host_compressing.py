"""The compressors' kernels, compiled for the CPU by g++, behind what `Compressing` asks of a device."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).parent
_KERNEL = re.compile(r'extern "C" __global__ void (\w+)\((.*?)\)', re.DOTALL)


class HostDevice:
    """Stands in for `fusion.cuda.device.Device`."""

    torch_device = torch.device("cpu")

    def __init__(self, source: str, folder: Path) -> None:
        program, library = folder / "compressing.cpp", folder / "compressing.so"
        text = [f'#include "{HERE / "on_host_threads.cpp"}"', source]
        for name, parameters in _KERNEL.findall(source):
            names = ", ".join(part.split()[-1].lstrip("*") for part in parameters.split(","))
            text.append(f'extern "C" void run_{name}(int blocks, {parameters})')
            text.append(f"{{ run(blocks, [=] {{ {name}({names}); }}); }}")
        program.write_text("\n".join(text))
        command = ["g++", "-std=c++20", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC", "-pthread"]
        subprocess.run([*command, str(program), "-o", str(library)], check=True)
        self._library = ctypes.CDLL(str(library))

    @contextmanager
    def on_side(self) -> Iterator[None]:
        yield

    def function(self, source: str, name: str) -> Callable[..., None]:
        return getattr(self._library, f"run_{name}")

    def launch(self, function: Callable[..., None], blocks: int, arguments: Sequence[Any]) -> None:
        kinds = {np.float64: ctypes.c_double, np.int64: ctypes.c_longlong, np.uint64: ctypes.c_ulonglong}
        function(blocks, *(kinds[type(argument)](argument.item()) for argument in arguments))
