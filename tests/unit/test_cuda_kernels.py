"""The CUDA kernels, as far as a machine without a GPU can tell: they compile, and compute the right thing."""

from __future__ import annotations

import shutil
from typing import Any

import msgspec
import pytest
import torch

from fusion.cuda.copying import source
from fusion.cuda.rules import Order, Rules
from fusion.dtypes import to_torch
from tests.gpu.arithmetic import packed, unpacked
from tests.gpu.combinations import combinations
from tests.gpu.host import HostKernels

COMBINATIONS = combinations()
LENGTHS = (1, 256, 5000, 0, 17, 4096)
ENDS = [0, 16, 272, 5280, 5280, 5312]
"""Where each of them begins in the buffer."""


@pytest.fixture(scope="module")
def nvrtc() -> Any:
    cupy = pytest.importorskip("cupy", reason="needs CuPy: pip install cupy-cuda12x")
    try:
        cupy.cuda.nvrtc.getVersion()
    except RuntimeError as error:
        pytest.skip(f"needs NVRTC: pip install nvidia-cuda-nvrtc-cu12 ({error})")
    return cupy.cuda.nvrtc


def compiled(nvrtc: Any, code: str, arch: str, defines: tuple[str, ...] = ()) -> str:
    """PTX, after machine code was made as well."""
    program = nvrtc.createProgram(code, "kernels.cu", (), ())
    try:
        nvrtc.compileProgram(program, (f"-arch={arch}", "-std=c++17", *defines))
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    assert len(nvrtc.getCUBIN(program)) > 0
    return str(nvrtc.getPTX(program).decode())


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("rules", COMBINATIONS, ids=lambda rules: "".join(rules.defines))
def test_copying_compiles_and_moves_sixteen_bytes_at_a_time(nvrtc: Any, rules: Rules, arch: str) -> None:
    ptx = compiled(nvrtc, source(), arch, rules.defines)
    for name in ("pack", "unpack"):
        body = ptx.split(f".entry {name}(")[1].split(".entry")[0]
        wide_load = any(f"ld.global.{form}" in body for form in ("v4.", "v2.u64", "v2.f64"))
        wide_store = any(f"st.global.{form}" in body for form in ("v4.", "v2.u64", "v2.f64"))
        assert wide_load or wide_store


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    if shutil.which("g++") is None:
        pytest.skip("needs g++, to compile the kernels for this processor")
    return HostKernels(COMBINATIONS, tmp_path_factory.mktemp("kernels"))


def values(dtype: torch.dtype, length: int, shift: int = 0) -> torch.Tensor:
    """Random values, and those that are special; `shift` elements off the alignment."""
    generator = torch.Generator().manual_seed(length)
    if dtype.is_floating_point:
        made = torch.randn(length + shift, generator=generator, dtype=torch.float64).mul_(100).to(dtype)
        special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0], dtype=dtype)
        made[: len(special)] = special[: len(made)]
    else:
        low, high = (0, 2) if dtype == torch.bool else (0, 256) if dtype == torch.uint8 else (-128, 128)
        made = torch.randint(low, high, (length + shift,), generator=generator).to(dtype)
    return made[shift:]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """NaN is NaN, whatever its bits."""
    if a.dtype.is_floating_point:
        return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    return torch.equal(a, b)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("number", range(len(COMBINATIONS)), ids=lambda n: "".join(COMBINATIONS[n].defines))
def test_packing_casts_and_scales_as_torch_does(kernels: HostKernels, number: int, shift: int) -> None:
    for prescale in (1.0, 0.5) if COMBINATIONS[number].dtype != "bool" else (1.0,):
        rules = msgspec.structs.replace(COMBINATIONS[number], prescale=prescale)
        tensors = [values(to_torch(rules.dtype), length, shift) for length in LENGTHS]
        buffer = kernels.pack(number, rules, tensors, 1 << 20)
        for tensor, at in zip(tensors, ENDS, strict=True):
            expected = packed(tensor, buffer.dtype, int(rules.order), prescale)
            assert same_bits(buffer[at : at + len(tensor)], expected)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("number", range(len(COMBINATIONS)), ids=lambda n: "".join(COMBINATIONS[n].defines))
def test_unpacking_averages_scales_and_rounds_as_torch_does(
    kernels: HostKernels, number: int, shift: int
) -> None:
    rules = msgspec.structs.replace(COMBINATIONS[number], divisor=3, postscale=0.5)
    if rules.dtype == "bool":
        rules = msgspec.structs.replace(rules, divisor=1, postscale=1.0)
    dtype = to_torch(rules.dtype)
    buffer = kernels.pack(number, rules, [values(dtype, length) for length in LENGTHS], 1 << 20)
    tensors = [torch.zeros(length + shift, dtype=dtype)[shift:] for length in LENGTHS]
    kernels.unpack(number, rules, tensors, buffer)
    for tensor, at in zip(tensors, ENDS, strict=True):
        part = buffer[at : at + len(tensor)]
        expected = unpacked(part, dtype, int(rules.order), rules.divisor, rules.postscale)
        assert same_bits(tensor, expected)


@pytest.mark.parametrize("order", [Order.NAN_FIRST, Order.NAN_LAST])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_ordered_integers_compare_as_the_floats_do_with_nan_at_an_end(
    kernels: HostKernels, dtype: str, order: Order
) -> None:
    number = next(n for n, rules in enumerate(COMBINATIONS) if (rules.dtype, rules.order) == (dtype, order))
    ascending = torch.tensor(
        [-float("inf"), -2.0, -1e-5, 0.0, 1e-5, 3.0, float("inf")], dtype=to_torch(dtype)
    )
    nan = torch.tensor([float("nan")], dtype=to_torch(dtype))
    tensors = [torch.cat([nan, ascending] if order == Order.NAN_FIRST else [ascending, nan])]
    buffer = kernels.pack(number, COMBINATIONS[number], tensors, 1 << 20)[: len(tensors[0])]
    assert (buffer.diff() > 0).all()
