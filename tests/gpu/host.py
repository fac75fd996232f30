"""The copying kernels, compiled for the CPU by g++ and called by ctypes."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch

from fusion.cuda.plan import pieces_of
from fusion.cuda.rules import Rules
from fusion.dtypes import to_torch

HERE = Path(__file__).parent
_ONE = """
#define DATA {data}
#define ACC {acc}
#define ORDER {order}
#define pack pack_{number}
#define unpack unpack_{number}
namespace types_{number} {{
#include "{source}"
}}
extern "C" void run_pack_{number}(
    int blocks, const unsigned long long *parts, const void *chunks, void *buffer, double scale) {{
    using namespace types_{number};
    run(blocks, 256, [=] {{ pack_{number}(parts, (const Chunk *)chunks, (acc_t *)buffer, scale); }});
}}
extern "C" void run_unpack_{number}(
    int blocks, const unsigned long long *parts, const void *chunks, const void *buffer, long long divisor,
    double scale) {{
    using namespace types_{number};
    run(blocks, 256,
        [=] {{ unpack_{number}(parts, (const Chunk *)chunks, (const acc_t *)buffer, divisor, scale); }});
}}
#undef DATA
#undef ACC
#undef ORDER
#undef pack
#undef unpack
"""


class HostKernels:
    """Compiled kernels, one pair for each set of rules."""

    def __init__(self, combinations: Sequence[Rules], folder: Path) -> None:
        source = files("fusion.cuda").joinpath("copying.cu")
        text = [f'#include "{HERE / "on_host.cpp"}"']
        for number, rules in enumerate(combinations):
            data, acc, order = (define.split("=")[1] for define in rules.defines)
            text.append(_ONE.format(number=number, data=data, acc=acc, order=order, source=source))
        program, library = folder / "kernels.cpp", folder / "kernels.so"
        program.write_text("\n".join(text))
        command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", str(program), "-o", str(library)]
        subprocess.run(command, check=True)
        self._library = ctypes.CDLL(str(library))

    def pack(self, number: int, rules: Rules, tensors: Sequence[torch.Tensor], capacity: int) -> torch.Tensor:
        """The buffer, of one piece."""
        (piece,) = pieces_of([tensor.numel() for tensor in tensors], capacity)
        buffer = torch.zeros(piece.count, dtype=to_torch(rules.buffer_dtype))
        pointers = np.array([tensor.data_ptr() for tensor in tensors], np.uint64)
        getattr(self._library, f"run_pack_{number}")(
            len(piece.chunks),
            ctypes.c_void_p(pointers.ctypes.data),
            ctypes.c_void_p(piece.chunks.ctypes.data),
            ctypes.c_void_p(buffer.data_ptr()),
            ctypes.c_double(rules.prescale),
        )
        return buffer

    def unpack(
        self, number: int, rules: Rules, tensors: Sequence[torch.Tensor], buffer: torch.Tensor
    ) -> None:
        """Fill the tensors from a buffer of one piece."""
        (piece,) = pieces_of([tensor.numel() for tensor in tensors], len(buffer) + 16)
        pointers = np.array([tensor.data_ptr() for tensor in tensors], np.uint64)
        getattr(self._library, f"run_unpack_{number}")(
            len(piece.chunks),
            ctypes.c_void_p(pointers.ctypes.data),
            ctypes.c_void_p(piece.chunks.ctypes.data),
            ctypes.c_void_p(buffer.data_ptr()),
            ctypes.c_longlong(rules.divisor),
            ctypes.c_double(rules.postscale),
        )
