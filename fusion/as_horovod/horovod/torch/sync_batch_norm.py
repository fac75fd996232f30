"""Batch normalisation over all ranks, where Horovod has it."""

from fusion.torch import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
