"""The double of the compressors' kernels, part of `doubles.py`: it computes with torch what they compute.

How a payload is laid out, and what it holds, is for `fusion.cuda.codecs` and the tests to say. That the
kernels compute the same is what `test_cuda_compressing.py` sees.
"""

from __future__ import annotations

from typing import Any

import torch

from fusion.cuda.compressing import CHUNK
from tests.gpu.arithmetic import elements

_MAGNITUDE = 0x7FFFFFFF


class CompressingKernel:
    """`compressing.cu`; arguments are as the kernels have them."""

    def quantize(self, blocks: int, *arguments: Any) -> None:
        address, codes, scales, count, row, seed = map(int, arguments)
        values = _floats(address, count)
        for number, part in enumerate(values.split(row)):
            scale = part.abs().max() / 127
            steps = part / (scale or 1.0)
            if seed:
                noise = torch.rand(len(part), generator=torch.Generator().manual_seed(seed % 2**32 + number))
                steps = (steps + noise).floor()
            code = steps.round().clamp(-127, 127).nan_to_num(0.0)
            elements(codes, count, torch.int8).split(row)[number].copy_(code)
            _floats(scales, blocks)[number] = scale

    def add_quantized(self, blocks: int, *arguments: Any) -> None:
        codes, scales, total, count, row, sign = arguments
        scale = _spread(scales, blocks, int(row), int(count))
        code = elements(int(codes), int(count), torch.int8).float()
        _floats(total, count).addcmul_(code, scale, value=int(sign))  # Rounded once, as the kernel does.

    def signs(self, blocks: int, *arguments: Any) -> None:
        address, bits, scales, count, row = map(int, arguments)
        values = _floats(address, count)
        means = [part.abs().double().mean() for part in values.split(row)]
        _floats(scales, blocks).copy_(torch.stack(means))
        padded = torch.zeros(-(-count // 8) * 8, dtype=torch.int64)
        padded[:count] = values >= 0
        packed = (padded.view(-1, 8) << torch.arange(8)).sum(1)
        elements(bits, len(packed), torch.uint8).copy_(packed)

    def add_signs(self, blocks: int, *arguments: Any) -> None:
        bits, scales, total, count, row, sign = arguments
        packed = elements(int(bits), -(-int(count) // 8), torch.uint8).to(torch.int64)
        positive = (packed[:, None] >> torch.arange(8) & 1).view(-1)[: int(count)] == 1
        scale = _spread(scales, blocks, int(row), int(count))
        _floats(total, count).add_(torch.where(positive, scale, -scale), alpha=int(sign))

    def count_digits(self, blocks: int, *arguments: Any) -> None:
        values, search, histogram, count, shift = map(int, arguments)
        prefix, mask = elements(search, 2, torch.int32).tolist()
        bits = _bits(values, count)
        digits = bits[(bits & mask) == prefix] >> shift & 255
        elements(histogram, 256, torch.int64).add_(torch.bincount(digits, minlength=256))

    def choose_digit(self, blocks: int, *arguments: Any) -> None:
        search, histogram, shift = map(int, arguments)
        counts, wanted = elements(histogram, 256, torch.int64), elements(search, 2, torch.int64)[1:]
        digit = 255
        while digit > 0 and counts[digit] < wanted:
            wanted -= counts[digit]
            digit -= 1
        found = elements(search, 2, torch.int32)
        found |= torch.tensor([digit << shift, 255 << shift]).to(torch.int32)
        counts.zero_()

    def count_chosen(self, blocks: int, *arguments: Any) -> None:
        values, search, above, equal, count = map(int, arguments)
        least = int(elements(search, 1, torch.int32))
        for number, chunk in enumerate(_bits(values, count).split(CHUNK)):
            elements(above, blocks, torch.int32)[number] = (chunk > least).sum()
            elements(equal, blocks, torch.int32)[number] = (chunk == least).sum()

    def write_chosen(self, blocks: int, *arguments: Any) -> None:
        values, search, above, equal, indices, chosen, count = map(int, arguments)
        least, wanted = int(elements(search, 1, torch.int32)), int(elements(search, 2, torch.int64)[1])
        for number, chunk in enumerate(_bits(values, count).split(CHUNK)):
            before = [int(elements(each, blocks, torch.int64)[number]) for each in (above, equal)]
            tied = chunk == least
            taken = (chunk > least) | (tied & (before[1] + tied.cumsum(0) <= wanted))
            where = taken.nonzero()[:, 0] + number * CHUNK
            at = before[0] + min(before[1], wanted)
            elements(indices + 4 * at, len(where), torch.int32).copy_(where)
            _floats(chosen + 4 * at, len(where)).copy_(_floats(values, count)[where])


def _floats(address: Any, count: Any) -> torch.Tensor:
    return elements(int(address), int(count), torch.float32)


def _bits(address: int, count: int) -> torch.Tensor:
    return elements(address, count, torch.int32).to(torch.int64) & _MAGNITUDE


def _spread(scales: Any, blocks: int, row: int, count: int) -> torch.Tensor:
    """The scale of each element."""
    return _floats(scales, blocks).repeat_interleave(row)[:count]
