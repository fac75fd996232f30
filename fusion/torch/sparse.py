"""Reduction of sparse tensors: each rank's rows travel, not the whole table.

Rows are merged before they are sent. Cost: each rank receives the rows of all
ranks, so a table of which every rank uses most rows is cheaper dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from coordinator.handle import Handle
from coordinator.messages import ReduceOp
from fusion.torch.ops import allgather_async
from fusion.torch.process_sets import ProcessSet, global_process_set, group_of


class SparseHandle:
    """The future of a sparse reduction. As in Horovod, calling it gives the result."""

    def __init__(
        self, name: str, shape: Sequence[int], divisor: int, indices: Handle, values: Handle
    ) -> None:
        self.name = name
        self._shape = tuple(shape)
        self._divisor = divisor
        self._parts = (indices, values)

    def done(self) -> bool:
        """Whether all rows have arrived."""
        return all(part.done() for part in self._parts)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error of the first part that failed, or None; waits for both."""
        errors = [part.exception(timeout) for part in self._parts]
        return next((error for error in errors if error is not None), None)

    def result(self, timeout: float | None = None) -> torch.Tensor:
        """The sum or average, coalesced; waits for it."""
        indices, values = (part.result(timeout) for part in self._parts)
        total = torch.sparse_coo_tensor(indices.t(), values, self._shape).coalesce()
        return total / self._divisor if self._divisor != 1 else total

    def __call__(self) -> torch.Tensor:
        """The same as `result()`."""
        return self.result()


def sparse_allreduce_async(
    tensor: Any,
    name: str | None = None,
    op: Any = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
) -> SparseHandle:
    """Sum or average a sparse COO tensor over all ranks.

    Args:
        tensor: of one shape on all ranks; each rank may have any number of entries, also none.
        name: as for `allreduce`.
        op: `Average` or `Sum`.
        process_set: the ranks that take part.

    Returns:
        A handle for `poll` and `synchronize`; its result is a coalesced sparse tensor.

    Raises:
        TypeError: the tensor is not a sparse COO tensor.
        ValueError: the op is neither Average nor Sum.
    """
    group = group_of(process_set)
    name = name if name is not None else group.unnamed("sparse_allreduce", blocking=False)
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.sparse_coo:
        raise TypeError(f"'{name}' is not a sparse COO tensor: use allreduce_async")
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ValueError(f"'{name}' is sparse, which only op=Average and op=Sum can reduce")
    merged = tensor.detach().coalesce()
    indices = allgather_async(merged.indices().t(), name=f"{name}.indices", process_set=process_set)
    values = allgather_async(merged.values(), name=f"{name}.values", process_set=process_set)
    divisor = group.topology.size if op == ReduceOp.AVERAGE else 1
    return SparseHandle(name, tensor.shape, divisor, indices, values)
