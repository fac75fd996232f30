"""The compressors' kernels: they compile for GPUs, and, compiled for this processor, do what they say."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

import fusion.compression as fc
from fusion.cuda.codecs import on_device
from fusion.cuda.compressing import CHUNK, Compressing, source
from tests.gpu.host_compressing import HostDevice
from tests.unit.test_cuda_kernels import compiled, nvrtc  # noqa: F401 - a fixture

ROW = 512


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_kernels_compile(nvrtc: Any, arch: str) -> None:  # noqa: F811
    ptx = compiled(nvrtc, source(), arch)
    for name in ("quantize", "add_quantized", "signs", "add_signs", "count_digits", "write_chosen"):
        assert f".entry {name}(" in ptx


@pytest.fixture(scope="module")
def compressing(tmp_path_factory: pytest.TempPathFactory) -> Compressing:
    if shutil.which("g++") is None:
        pytest.skip("needs g++, to compile the kernels for this processor")
    device: Any = HostDevice(source(), tmp_path_factory.mktemp("compressing"))
    return Compressing(device)


def draw(count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(count))


def quantized(
    kernels: Compressing, values: torch.Tensor, row: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = torch.empty(len(values), dtype=torch.int8), torch.empty(-(-len(values) // row))
    kernels.quantize(values, codes, scales, row, seed)
    return codes, scales


def chosen_of(kernels: Compressing, values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    indices, chosen = torch.empty(count, dtype=torch.int32), torch.empty(count)
    kernels.largest(values, indices, chosen)
    return indices, chosen


def rows(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return values.split(ROW)


@pytest.mark.parametrize("count", [1, ROW, 3 * ROW + 5])
def test_codes_are_the_nearest_steps_of_a_127th_of_the_largest(compressing: Compressing, count: int) -> None:
    values = draw(count)
    codes, scales = quantized(compressing, values, ROW)
    expected = torch.stack([row.abs().max() / 127 for row in rows(values)])
    torch.testing.assert_close(scales, expected)
    steps = torch.cat([row / scale for row, scale in zip(rows(values), scales, strict=True)])
    assert torch.equal(codes, steps.round().to(torch.int8))


def test_rounding_at_random_keeps_the_mean(compressing: Compressing) -> None:
    values = torch.full((ROW,), 0.3)
    values[0] = 127.0
    means = [quantized(compressing, values, ROW, seed)[0][1:].float().mean() for seed in (1, 2)]
    assert means[0] != means[1]
    assert all(abs(mean - 0.3) < 0.1 for mean in means)


def test_a_row_of_zeros_stays_one(compressing: Compressing) -> None:
    codes, scales = quantized(compressing, torch.zeros(10), ROW)
    assert not codes.any() and not scales.any()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_decoded_codes_are_added(compressing: Compressing, sign: float) -> None:
    values, total = draw(2 * ROW + 3), torch.ones(2 * ROW + 3)
    codes, scales = quantized(compressing, values, ROW)
    compressing.add_quantized(codes, scales, total, ROW, sign)
    decoded = torch.cat([row.float() * scale for row, scale in zip(rows(codes), scales, strict=True)])
    torch.testing.assert_close(total, 1.0 + sign * decoded)


@pytest.mark.parametrize("count", [3, ROW, 2 * ROW + 13])
def test_signs_and_mean_magnitudes(compressing: Compressing, count: int) -> None:
    values = draw(count)
    values[0] = 0.0
    bits, scales = torch.empty(-(-count // 8), dtype=torch.uint8), torch.empty(-(-count // ROW))
    compressing.signs(values, bits, scales, ROW)
    torch.testing.assert_close(scales, torch.stack([row.abs().mean() for row in rows(values)]))
    unpacked = [(int(bits[i // 8]) >> (i % 8)) & 1 for i in range(count)]
    assert unpacked == (values >= 0).int().tolist()
    total = torch.zeros(count)
    compressing.add_signs(bits, scales, total, ROW)
    expected = [torch.where(row >= 0, scale, -scale) for row, scale in zip(rows(values), scales, strict=True)]
    assert torch.equal(total, torch.cat(expected))


@pytest.mark.parametrize("count", [1, 100, CHUNK + 77])
@pytest.mark.parametrize("share", [0.01, 0.5, 1.0])
def test_the_largest_come_in_ascending_order(compressing: Compressing, count: int, share: float) -> None:
    values = draw(count)
    wanted = max(1, int(share * count))
    indices, chosen = chosen_of(compressing, values, wanted)
    expected = values.abs().topk(wanted).indices.sort().values
    assert indices.tolist() == expected.tolist() and torch.equal(chosen, values[expected])


def test_of_equal_magnitudes_the_lower_indices_go_first(compressing: Compressing) -> None:
    values = torch.tensor([1.0, -2.0, 2.0, -1.0, 5.0, 2.0]).repeat(2 * CHUNK // 6)
    fives = len(values) // 6
    indices, _ = chosen_of(compressing, values, fives + 4)
    expected = sorted([*range(4, len(values), 6), 1, 2, 5, 7])
    assert indices.tolist() == expected


def test_nan_is_larger_than_all(compressing: Compressing) -> None:
    values = draw(50)
    values[17] = float("nan")
    assert chosen_of(compressing, values, 1)[0].tolist() == [17]


@pytest.mark.parametrize("place", [0, 17, ROW - 1])
def test_a_row_with_nan_has_the_scale_nan(compressing: Compressing, place: int) -> None:
    values = draw(2 * ROW)
    values[place] = float("nan")
    _, scales = quantized(compressing, values, ROW)
    assert scales.isnan().tolist() == [True, False]


METHODS = ["int8:rounding=nearest,block=64", "onebit:64", "topk:0.1", "topk:1.0"]


@pytest.mark.parametrize("count", [5, 640, 5003])
@pytest.mark.parametrize("spec", METHODS)
def test_a_payload_has_the_bytes_of_the_cpus_compressor(
    compressing: Compressing, spec: str, count: int
) -> None:
    info, method, values = fc.BucketInfo.of([("t", (count,))]), fc.parse(spec), draw(count)
    coding: Any = on_device(spec, compressing, adds=False)
    mine, theirs = coding.encode(values, info, fc.Key(0)), method.encode(values, info, fc.Key(0))
    if spec.startswith("onebit"):  # A mean may differ in its last bits.
        (scales, bits), (other_scales, other_bits) = method.parts(mine, info), method.parts(theirs, info)
        torch.testing.assert_close(scales, other_scales, rtol=1e-6, atol=0.0)
        mine, theirs = bits, other_bits
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("spec", ["int8:block=64", *METHODS])
def test_a_payload_of_the_cpus_compressor_is_decoded_with_the_same_bits(
    compressing: Compressing, spec: str, sign: int
) -> None:
    info, method = fc.BucketInfo.of([("t", (5003,))]), fc.parse(spec)
    payload = method.encode(draw(5003), info, fc.Key(3, 1))
    mine, theirs = draw(5003) * 0.3, draw(5003) * 0.3
    coding: Any = on_device(spec, compressing, adds=False)
    coding.add(payload, info, mine, sign)
    method.add(payload, info, theirs, sign)
    assert torch.equal(mine, theirs)


def test_int8_at_random_has_the_scales_of_the_cpus_compressor_and_codes_a_step_from_its(
    compressing: Compressing,
) -> None:
    info, method, values = fc.BucketInfo.of([("t", (5003,))]), fc.int8(), draw(5003)
    coding: Any = on_device(method.spec, compressing, adds=False)
    mine, other = coding.encode(values, info, fc.Key(7, 0)), coding.encode(values, info, fc.Key(7, 1))
    assert torch.equal(mine, coding.encode(values, info, fc.Key(7, 0))) and not torch.equal(mine, other)
    (scales, codes), (wanted, near) = (
        method.parts(mine, info),
        method.parts(method.encode(values, info, fc.Key(7, 0)), info),
    )
    assert torch.equal(scales, wanted) and (codes.int() - near.int()).abs().max() == 1


def test_what_a_device_compresses() -> None:
    kernels: Any = None
    gathered = [on_device(spec, kernels, adds=False) for spec in ("int8", "onebit", "topk:0.1")]
    assert all(gathered)
    for spec in ("fp16", "bf16:feedback=on"):
        assert on_device(spec, kernels, adds=True) is not None
        assert on_device(spec, kernels, adds=False) is None
    assert not any(on_device(spec, kernels, adds=True) for spec in ("terngrad", "randomk:0.1", "powersgd"))


def test_what_cannot_be_chosen_is_refused(compressing: Compressing) -> None:
    with pytest.raises(ValueError, match="cannot choose 4 of 3"):
        chosen_of(compressing, torch.ones(3), 4)
    with pytest.raises(ValueError, match="multiple of 8"):
        compressing.signs(torch.ones(3), torch.empty(1, dtype=torch.uint8), torch.empty(1), 12)
