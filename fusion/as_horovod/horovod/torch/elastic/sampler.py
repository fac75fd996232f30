"""The sampler, where Horovod has it."""

from fusion.torch.elastic import ElasticSampler

__all__ = ["ElasticSampler"]
