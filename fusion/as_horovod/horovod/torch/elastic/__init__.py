"""Elastic training, as far as `fusion.torch.elastic` goes."""

from fusion.torch.elastic import ElasticSampler, TorchState, run

__all__ = ["ElasticSampler", "TorchState", "run"]
