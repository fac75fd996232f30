"""The state of a training process, where Horovod has it."""

from fusion.torch.elastic import TorchState

__all__ = ["TorchState"]
