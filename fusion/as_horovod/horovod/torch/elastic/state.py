"""The state of a training process, where Horovod has it."""

from fusion.torch.elastic import ElasticSampler, ObjectState, State, TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState"]
