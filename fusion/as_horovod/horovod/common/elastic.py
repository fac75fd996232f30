"""Elastic state, where Horovod has it."""

from fusion.torch.elastic import ObjectState, State

__all__ = ["ObjectState", "State"]
