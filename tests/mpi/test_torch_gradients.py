"""Gradients and parameters of every kind under a `DistributedOptimizer`: sparse, strided, late, complex."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.mpi.torch_models import (
    assert_close,
    assert_same_on_all_ranks,
    both,
    loss,
    net,
    plain_sgd,
    sgd,
    total_loss,
    train,
)
from tests.ranks import ranks


@ranks(2)
@both
def test_gradients_set_by_hand_are_reduced(hvd, buckets):
    model = net()
    optimizer = hvd.DistributedOptimizer(plain_sgd(model.parameters()), buckets=buckets)
    for _ in range(2):
        before = [p.detach().clone() for p in model.parameters()]
        for parameter in model.parameters():
            parameter.grad = torch.full((1,), float(hvd.rank())).expand(parameter.shape)
        optimizer.step()
        for parameter, old in zip(model.parameters(), before, strict=True):
            assert torch.allclose(parameter, old - 0.05)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(50, 4, sparse=True)
        self.out = nn.Linear(4, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(0.5)


@ranks(2)
@both
@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients_equal_dense_ones(hvd, buckets, as_dense):
    model, reference = Table(), Table()
    optimizer = hvd.DistributedOptimizer(
        plain_sgd(model.parameters()), model.named_parameters(), sparse_as_dense=as_dense, buckets=buckets
    )
    alone = plain_sgd(reference.parameters())

    def value(table: nn.Module, step: int, rank: int) -> torch.Tensor:
        if rank == 1 and step == 1:  # This rank uses no row at all.
            return table.out(torch.ones(1, 4)).sum()
        return table.out(table.rows(torch.tensor([rank] * 20 + [3]))).sum()

    for step in range(3):
        optimizer.zero_grad()
        value(model, step, hvd.rank()).backward()
        optimizer.step()
        assert model.rows.weight.grad.is_sparse
        alone.zero_grad()
        ((value(reference, step, 0) + value(reference, step, 1)) / 2).backward()
        alone.step()
    assert_close(model, reference)
    assert_same_on_all_ranks(hvd, model)


@ranks(2)
def test_sparse_adam_takes_what_comes_back(hvd):
    for as_dense in (False, True):
        rows = nn.Embedding(10, 3, sparse=True)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SparseAdam(rows.parameters()), sparse_as_dense=as_dense
        )
        rows(torch.tensor([hvd.rank()])).sum().backward()
        optimizer.step()


@ranks(2)
@both
def test_gradients_keep_the_layout_that_autograd_gave_them(hvd, buckets):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3)).to(memory_format=torch.channels_last)
    model.register_parameter("turned", nn.Parameter(torch.ones(3, 5).t()))
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), buckets=buckets)

    def backward() -> None:
        image = torch.full((1, 3, 5, 5), hvd.rank() + 1.0).contiguous(memory_format=torch.channels_last)
        (model(image).sum() + (model.turned**2).sum()).backward()

    layouts = [p.stride() for p in model.parameters()]
    for _ in range(2):
        optimizer.zero_grad()
        backward()
        optimizer.step()
        for parameter, layout in zip(model.parameters(), layouts, strict=True):
            if all(length != 1 for length in parameter.shape):
                assert parameter.grad.stride() == layout
        assert model[1].weight.is_contiguous(memory_format=torch.channels_last)
    assert_same_on_all_ranks(hvd, model)


@ranks(2)
@both
def test_frozen_integer_and_empty_parameters_do_no_harm(hvd, buckets):
    model = net()
    model.index = nn.Parameter(torch.arange(3) + hvd.rank(), requires_grad=False)
    model.nothing = nn.Parameter(torch.empty(0, 3))
    model[3].requires_grad_(False)
    hvd.broadcast_parameters(model.state_dict(), 0)
    assert model.index.tolist() == [0, 1, 2]
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), buckets=buckets)
    hvd.broadcast_optimizer_state(optimizer, 0)
    for step in range(2):
        optimizer.zero_grad()
        (loss(model, step, hvd.rank()) + model.nothing.sum()).backward()
        optimizer.step()
    assert model.index.grad is None and model[3].weight.grad is None
    assert_same_on_all_ranks(hvd, model)


@ranks(2)
@both
def test_parameters_may_be_thawed_and_added_later(hvd, buckets):
    model = net()
    model[2].requires_grad_(False)
    parameters = list(model.parameters())
    optimizer = hvd.DistributedOptimizer(plain_sgd(parameters[:4]), buckets=buckets)
    train(optimizer, model, [0], hvd.rank())
    model[2].requires_grad_(True)
    train(optimizer, model, [1], hvd.rank())
    optimizer.add_param_group({"params": parameters[4:], "lr": 0.2})
    train(optimizer, model, [2, 3], hvd.rank())
    assert_same_on_all_ranks(hvd, model)
    reference = net()
    alone = plain_sgd(list(reference.parameters())[:4])
    for step in range(4):
        reference[2].requires_grad_(step > 0)
        if step == 2:
            alone.add_param_group({"params": list(reference.parameters())[4:], "lr": 0.2})
        reference.zero_grad()
        (total_loss(reference, step, 2) / 2).backward()
        alone.step()
    assert_close(model, reference)


@ranks(2)
@both
def test_several_dtypes_and_complex_parameters(hvd, buckets):
    dtypes = (torch.bfloat16, torch.float64, torch.float16, torch.complex64)
    model = nn.ParameterList([torch.ones(3, dtype=dtype) for dtype in dtypes])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), buckets=buckets)
    for _ in range(2):
        optimizer.zero_grad()
        sum((p.real.to(torch.float64) * (2 * hvd.rank() + 1)).sum() for p in model).backward()
        optimizer.step()
    assert all(parameter.tolist() == [-3] * 3 for parameter in model)
    assert_same_on_all_ranks(hvd, model)
