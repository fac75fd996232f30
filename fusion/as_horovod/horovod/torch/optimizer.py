"""The distributed optimizer, where Horovod has it."""

from fusion.torch.optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
