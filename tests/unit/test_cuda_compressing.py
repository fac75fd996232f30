"""The compressors' kernels: they compile for GPUs, and, compiled for this processor, do what they say."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

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


def rows(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return values.split(ROW)


@pytest.mark.parametrize("count", [1, ROW, 3 * ROW + 5])
def test_codes_are_the_nearest_steps_of_a_127th_of_the_largest(compressing: Compressing, count: int) -> None:
    values = draw(count)
    codes, scales = compressing.quantize(values, ROW)
    expected = torch.stack([row.abs().max() / 127 for row in rows(values)])
    torch.testing.assert_close(scales, expected)
    steps = torch.cat([row / scale for row, scale in zip(rows(values), scales, strict=True)])
    assert torch.equal(codes, steps.round().to(torch.int8))


def test_rounding_at_random_keeps_the_mean(compressing: Compressing) -> None:
    values = torch.full((ROW,), 0.3)
    values[0] = 127.0
    means = [compressing.quantize(values, ROW, seed)[0][1:].float().mean() for seed in (1, 2)]
    assert means[0] != means[1]
    assert all(abs(mean - 0.3) < 0.1 for mean in means)


def test_a_row_of_zeros_stays_one(compressing: Compressing) -> None:
    codes, scales = compressing.quantize(torch.zeros(10), ROW)
    assert not codes.any() and not scales.any()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_decoded_codes_are_added(compressing: Compressing, sign: float) -> None:
    values, total = draw(2 * ROW + 3), torch.ones(2 * ROW + 3)
    codes, scales = compressing.quantize(values, ROW)
    compressing.add_quantized(codes, scales, total, ROW, sign)
    decoded = torch.cat([row.float() * scale for row, scale in zip(rows(codes), scales, strict=True)])
    torch.testing.assert_close(total, 1.0 + sign * decoded)


@pytest.mark.parametrize("count", [3, ROW, 2 * ROW + 13])
def test_signs_and_mean_magnitudes(compressing: Compressing, count: int) -> None:
    values = draw(count)
    values[0] = 0.0
    bits, scales = compressing.signs(values, ROW)
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
    indices, chosen = compressing.largest(values, wanted)
    expected = values.abs().topk(wanted).indices.sort().values
    assert indices.tolist() == expected.tolist() and torch.equal(chosen, values[expected])


def test_of_equal_magnitudes_the_lower_indices_go_first(compressing: Compressing) -> None:
    values = torch.tensor([1.0, -2.0, 2.0, -1.0, 5.0, 2.0]).repeat(2 * CHUNK // 6)
    fives = len(values) // 6
    indices, _ = compressing.largest(values, fives + 4)
    expected = sorted([*range(4, len(values), 6), 1, 2, 5, 7])
    assert indices.tolist() == expected


def test_nan_is_larger_than_all(compressing: Compressing) -> None:
    values = draw(50)
    values[17] = float("nan")
    assert compressing.largest(values, 1)[0].tolist() == [17]


def test_what_cannot_be_chosen_is_refused(compressing: Compressing) -> None:
    with pytest.raises(ValueError, match="cannot choose 4 of 3"):
        compressing.largest(torch.ones(3), 4)
    with pytest.raises(ValueError, match="multiple of 8"):
        compressing.signs(torch.ones(3), 12)
