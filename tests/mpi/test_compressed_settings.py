"""Compression that the settings ask for."""

from __future__ import annotations

import torch

from tests.mpi.test_compressed_optimizer import wrapped
from tests.mpi.torch_models import net, train
from tests.ranks import ranks

INIT = {
    "compression": "topk:0.1",
    "compression_rules": {"2.*": "none"},
    "compression_dense_below": 16,
    "compression_warmup_steps": 1,
}


@ranks(2)
def test_an_optimizer_that_is_told_nothing_does_what_the_settings_say(hvd):
    model = net()
    optimizer = wrapped(hvd, model, None)
    train(optimizer, model, range(3), hvd.rank())
    kept = optimizer.state_dict()["compression"]
    assert set(kept["tensors"]) == {"0.weight"}  # 2.weight by a rule, 3.weight is small, biases are vectors.
    assert kept["steps"] == 3


@ranks(2)
def test_an_optimizer_that_is_told_otherwise_does_that(hvd):
    model = net()
    optimizer = wrapped(hvd, model, hvd.Compression.none)
    train(optimizer, model, range(2), hvd.rank())
    assert "compression" not in optimizer.state_dict()


@ranks(2)
def test_operations_are_exact_unless_they_are_asked_not_to_be(hvd):
    assert torch.equal(hvd.allreduce(torch.arange(100.0)), torch.arange(100.0))
