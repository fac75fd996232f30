"""`powersgd`: each matrix as the product of two thin ones, found by one step of power iteration.

A gradient of n × m (a convolution's is output channels × the rest) becomes P (n × rank) and
Q (m × rank): ratio nm / (rank (n + m)), 512× for rank 1 and 1024 × 1024. Vectors, and matrices
that would not get smaller, travel as they are beside P. Linear: P and Q ride one all-reduce
each, whose size does not grow with the number of ranks.

P = M Q of the last time (warm start); the mean of P is orthonormalised; then Q = Mᵀ P, and the
mean of Q. Each rank's residual is M - P Qᵀ with its own Q, so nothing is lost or counted twice.
Needs error feedback. Cost: 4 n m rank operations, and the orthonormalisation of P, 2 n rank².
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import torch

from fusion.compression.base import (
    BucketInfo,
    Compressor,
    Key,
    Memory,
    Piece,
    Transport,
    check_whole,
    padded,
    parts_of,
    payload_of,
)

_START = 0x5EED


class PowerSGD(Compressor, frozen=True):
    """See the module.

    Args:
        rank: columns of the thin matrices, from 1 on.
        warm: start from the last Q, if there is a memory; otherwise from the same random one.
    """

    name: ClassVar[str] = "powersgd"
    paper: ClassVar[str] = "Vogels et al. 2019, PowerSGD, arXiv:1905.13727"
    linear: ClassVar[bool] = True

    rank: int = 4
    warm: bool = True
    feedback: bool = True

    def __post_init__(self) -> None:
        check_whole(self.rank, 1, 1 << 16, "powersgd: rank")

    @property
    def remembers(self) -> bool:
        """For feedback, and to start from the last time."""
        return self.feedback or self.warm

    def payload_bytes(self, info: BucketInfo) -> int:
        """Both thin matrices of each matrix, and the rest as it is."""
        return padded(4 * sum(self._counts(info)))

    def encode(
        self, values: torch.Tensor, info: BucketInfo, key: Key, memories: Sequence[Memory] | None = None
    ) -> torch.Tensor:
        """What is not in a matrix, then all P, then all Q: a factorisation of this rank's bucket alone."""
        dense, left, right = self._factors(values, info, memories, _same)
        return payload_of(torch.cat([dense, left, right]))

    def decode(self, payload: torch.Tensor, info: BucketInfo) -> torch.Tensor:
        """The products."""
        counts = self._counts(info)
        (flat,) = parts_of(payload, (torch.float32, sum(counts)))
        dense, left, right = flat.split(counts)
        return self._product(dense, left, right, info)

    def reduce(
        self,
        values: torch.Tensor,
        info: BucketInfo,
        key: Key,
        transport: Transport,
        memories: Sequence[Memory] | None = None,
        *,
        keep: bool = True,
    ) -> torch.Tensor:
        """See `Compressor.reduce`: two all-reduces, one after the other."""
        dense, left, right = self._factors(values, info, memories, transport.mean)
        if keep:
            values.sub_(self._product(self._dense(values, info), left, right, info))
        mean = transport.mean(right) if len(right) else right
        if memories is not None and self.warm and bool(mean.isfinite().all()):
            for number, basis in self._split(mean, info, side=1):
                memories[number].basis = basis.clone()
        return self._product(dense, left, mean, info)

    def _factors(
        self,
        values: torch.Tensor,
        info: BucketInfo,
        memories: Sequence[Memory] | None,
        mean: Callable[[torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The mean of what is in no matrix, the orthonormal P of the mean, and this rank's Q; each flat."""
        counts = self._counts(info)
        first = torch.empty(counts[0] + counts[1])
        first[: counts[0]] = self._dense(values, info)
        left, right = first[counts[0] :], torch.empty(counts[2])
        for number, thin in self._split(left, info, side=0):
            memory = None if memories is None or not self.warm else memories[number]
            torch.mm(_matrix(values, info.pieces[number]), self._basis(info.pieces[number], memory), out=thin)
        first = mean(first)
        left = first[counts[0] :]
        thins = zip(self._split(left, info, side=0), self._split(right, info, side=1), strict=True)
        for (number, thin), (_, other) in thins:
            thin.copy_(torch.linalg.qr(thin).Q)
            torch.mm(_matrix(values, info.pieces[number]).t(), thin, out=other)
        return first[: counts[0]], left, right

    def _product(
        self, dense: torch.Tensor, left: torch.Tensor, right: torch.Tensor, info: BucketInfo
    ) -> torch.Tensor:
        """The bucket that factors stand for."""
        bucket = torch.empty(info.count)
        at = 0
        for piece in info.pieces:
            if not self._thin(piece):
                piece.of(bucket).copy_(dense[at : at + piece.count])
                at += piece.count
        thins = zip(self._split(left, info, side=0), self._split(right, info, side=1), strict=True)
        for (number, thin), (_, other) in thins:
            torch.mm(thin, other.t(), out=_matrix(bucket, info.pieces[number]))
        return bucket

    def _dense(self, values: torch.Tensor, info: BucketInfo) -> torch.Tensor:
        """What is in no matrix, one after the other."""
        parts = [piece.of(values) for piece in info.pieces if not self._thin(piece)]
        return torch.cat(parts) if parts else torch.empty(0)

    def _split(self, flat: torch.Tensor, info: BucketInfo, *, side: int) -> list[tuple[int, torch.Tensor]]:
        """The thin matrices in a flat row of them, each with the number of its piece.

        Args:
            side: 0 for P, whose rows are those of the matrix, 1 for Q, whose rows are its columns.
        """
        found = []
        at = 0
        for number, piece in enumerate(info.pieces):
            if self._thin(piece):
                rows = _sides(piece)[side]
                found.append((number, flat[at : at + rows * self.rank].view(rows, self.rank)))
                at += rows * self.rank
        return found

    def _counts(self, info: BucketInfo) -> tuple[int, int, int]:
        """Elements that travel: in no matrix, in all P, in all Q."""
        thin = [_sides(piece) for piece in info.pieces if self._thin(piece)]
        dense = sum(piece.count for piece in info.pieces if not self._thin(piece))
        return (
            dense,
            self.rank * sum(rows for rows, _ in thin),
            self.rank * sum(columns for _, columns in thin),
        )

    def _thin(self, piece: Piece) -> bool:
        """Whether a tensor is a matrix that gets smaller; P cannot have more columns than rows either."""
        rows, columns = _sides(piece)
        return self.rank <= min(rows, columns) and self.rank * (rows + columns) < rows * columns

    def _basis(self, piece: Piece, memory: Memory | None) -> torch.Tensor:
        columns = _sides(piece)[1]
        if memory is not None and memory.basis is not None and memory.basis.shape == (columns, self.rank):
            return memory.basis
        generator = np.random.Generator(np.random.SFC64(np.random.SeedSequence((_START, columns, self.rank))))
        return torch.from_numpy(generator.standard_normal((columns, self.rank), dtype=np.float32))


def _sides(piece: Piece) -> tuple[int, int]:
    """Rows and columns of a tensor seen as a matrix; a vector is a single row."""
    if len(piece.shape) < 2 or not piece.count:
        return 1, piece.count
    return piece.shape[0], piece.count // piece.shape[0]


def _matrix(bucket: torch.Tensor, piece: Piece) -> torch.Tensor:
    return piece.of(bucket).view(_sides(piece))


def _same(values: torch.Tensor) -> torch.Tensor:
    return values
