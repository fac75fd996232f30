"""Training with compressed buckets: what is remembered, agreed and restored."""

from __future__ import annotations

import pytest
import torch

import fusion.compression as fc
from tests.mpi.torch_models import (
    assert_close,
    assert_same_on_all_ranks,
    both,
    loss,
    net,
    sgd,
    train,
    trained_alone,
)
from tests.ranks import ranks

METHODS = ["fp16", "bf16", "int8", "onebit:8", "terngrad", "topk:0.1", "randomk:0.2", "powersgd:1"]


def everything(method: str, **options) -> fc.Policy:
    """Compress every parameter of a small model."""
    return fc.Policy(method, dense_below=0, dense_vectors=False, **options)


@ranks(1, 2, 4)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_to_the_same_parameters_on_all_ranks(hvd, method):
    model = net()
    start = float(sum(loss(model, step, hvd.rank()) for step in range(4)))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.02), model.named_parameters(), compression=everything(method)
    )
    for _ in range(5):
        train(optimizer, model, range(4), hvd.rank())
    assert_same_on_all_ranks(hvd, model)
    total = hvd.allreduce(
        torch.tensor([start, float(sum(loss(model, step, hvd.rank()) for step in range(4)))])
    )
    assert total[1] < total[0]


@ranks(2, 3)
@both
@pytest.mark.parametrize("method", ["none", "fp16", "topk:1.0", "randomk:1", "powersgd:4"])
def test_what_loses_nothing_trains_as_one_process_does(hvd, method, buckets):
    model = net()
    optimizer = hvd.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), compression=everything(method), buckets=buckets
    )
    train(optimizer, model, range(4), hvd.rank())
    assert_close(model, trained_alone(hvd.size(), range(4)), 2e-3 if method == "fp16" else 1e-5)
    assert_same_on_all_ranks(hvd, model)
