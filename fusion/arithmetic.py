"""How values of different ranks become one: the numeric rules, for one piece of memory at a time.

Used by the collectives on the cycle thread. Everything is computed by one rank
and copied to the others, so results are the same bits everywhere; inputs are
combined in the order they are given.

| dtype | summed in | rules |
|---|---|---|
| float32, float64 | itself | an average is the sum divided by size, correctly rounded |
| float16, bfloat16 | float32 | scaled there too, rounded once at the end |
| integers | itself; int64 for an average | a sum wraps modulo 2^bits; an average is truncated toward zero |
| bool | itself | sum and max mean any, min and product mean all |

Scale factors multiply every input before, and the result after; for integers
in float64, each time truncated toward zero to the dtype. Min and max of floats
propagate NaN, as torch does.

Scratch memory is kept between calls and is as large as the largest piece seen:
callers pass pieces that fit the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from coordinator.messages import ReduceOp
from fusion.dtypes import to_torch

Binary = Callable[..., torch.Tensor]

_NUMERIC: dict[ReduceOp, Binary] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVERAGE: torch.add,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
}
_BOOLEAN: dict[ReduceOp, Binary] = {
    ReduceOp.SUM: torch.logical_or,
    ReduceOp.MAX: torch.logical_or,
    ReduceOp.MIN: torch.logical_and,
    ReduceOp.PRODUCT: torch.logical_and,
}


class Scratch:
    """Private memory that is reused from call to call, by dtype and purpose."""

    def __init__(self) -> None:
        self._kept: dict[tuple[torch.dtype, str], torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """What is kept at present; on any thread."""
        return sum(kept.nbytes for kept in list(self._kept.values()))

    def take(self, dtype: torch.dtype, count: int, purpose: str) -> torch.Tensor:
        """`count` elements, overwritten by the next call with the same dtype and purpose."""
        kept = self._kept.get((dtype, purpose))
        if kept is None or len(kept) < count:
            kept = self._kept[dtype, purpose] = torch.empty(count, dtype=dtype)
        return kept[:count]


class Arithmetic:
    """The rules for one reduce op, dtype, scaling and number of ranks.

    All tensors passed in are one-dimensional, contiguous and equally long.

    Attributes:
        dtype: of the inputs and the result.
        accumulator: dtype of partial results, which may be wider.

    Raises:
        ValueError: the op has no meaning for the dtype.
    """

    def __init__(
        self,
        op: ReduceOp,
        dtype: str,
        size: int,
        *,
        prescale: float,
        postscale: float,
        scratch: Scratch,
    ) -> None:
        self.dtype = to_torch(dtype)
        self._binary = _binary(op, dtype, prescale, postscale)
        self._floating = self.dtype.is_floating_point
        self._prescale = prescale
        averaged = size if op == ReduceOp.AVERAGE else 1
        # Multiplying is faster than dividing, and as exact for powers of two only.
        multiplies = self._floating and averaged.bit_count() == 1
        self._divisor = 1 if multiplies else averaged
        self._postscale = postscale / averaged if multiplies else postscale
        self._scratch = scratch
        self.accumulator = _accumulator(op, self.dtype, prescale)

    @property
    def widens(self) -> bool:
        """Whether partial results are wider than the data."""
        return self.accumulator != self.dtype

    def reduce(self, inputs: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """The complete result of the inputs of all ranks; `out` may be one of them."""
        if not self.widens:
            self.accumulate(inputs, out)
            self.finish(out, out)
            return
        total = self._scratch.take(self.accumulator, len(out), "total")
        self.accumulate(inputs, total)
        self.finish(total, out)

    def accumulate(self, inputs: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        """Prescale inputs and combine them into a partial result.

        `into` has the accumulator's dtype and may be one of the inputs: it is
        written in the last step only, when that input is no longer needed.
        """
        running = self._load(inputs[0], "running")
        if len(inputs) == 1:
            _assign(into, running)
            return
        for position, piece in enumerate(inputs[1:], start=2):
            target = into
            if position < len(inputs):
                target = self._scratch.take(self.accumulator, len(into), "running")
            self._binary(running, self._load(piece, "next"), out=target)
            running = target

    def combine(self, earlier: torch.Tensor, into: torch.Tensor) -> None:
        """Combine two partial results, `earlier` on the left, into the second."""
        self._binary(earlier, into, out=into)

    def finish(self, partial: torch.Tensor, out: torch.Tensor) -> None:
        """Average, postscale and round a partial result of all ranks, which is consumed.

        `out` is of the data's dtype, and may be `partial`.
        """
        if self._divisor != 1:
            partial.div_(self._divisor, rounding_mode=None if self._floating else "trunc")
        if self._postscale != 1.0:
            if self._floating:
                partial.mul_(self._postscale)
            else:
                partial = partial.double().mul_(self._postscale)
        _assign(out, partial)

    def _load(self, piece: torch.Tensor, purpose: str) -> torch.Tensor:
        """The piece in the accumulator's dtype, prescaled; itself if it is that already."""
        if self._prescale == 1.0 and not self.widens:
            return piece
        if not self._floating:
            scaled = piece if self._prescale == 1.0 else piece.double().mul_(self._prescale).to(self.dtype)
            return scaled.to(self.accumulator)
        loaded = self._scratch.take(self.accumulator, len(piece), purpose)
        # Converting first and adding after is several times faster than torch's mixed-dtype add.
        if self.widens:
            loaded.copy_(piece)
            return loaded.mul_(self._prescale) if self._prescale != 1.0 else loaded
        return torch.mul(piece, self._prescale, out=loaded)


def _assign(target: torch.Tensor, value: torch.Tensor) -> None:
    if target is not value:
        target.copy_(value)


def _accumulator(op: ReduceOp, dtype: torch.dtype, prescale: float) -> torch.dtype:
    if dtype in (torch.float16, torch.bfloat16):
        exact = op in (ReduceOp.MIN, ReduceOp.MAX) and prescale == 1.0
        return dtype if exact else torch.float32
    if op == ReduceOp.AVERAGE and not dtype.is_floating_point:
        return torch.int64
    return dtype


def _binary(op: ReduceOp, dtype: str, prescale: float, postscale: float) -> Binary:
    table = _BOOLEAN if dtype == "bool" else _NUMERIC
    if op not in table:
        names = ", ".join(known.name.lower() for known in table)
        raise ValueError(f"cannot reduce {dtype} tensors with op {op.name.lower()}: use one of {names}")
    if dtype == "bool" and (prescale != 1.0 or postscale != 1.0):
        raise ValueError("bool tensors cannot be scaled: leave prescale and postscale at 1")
    return table[op]
