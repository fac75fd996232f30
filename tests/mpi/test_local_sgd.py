"""Local SGD, post-local SGD and DiLoCo against what one process computes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fusion.federated as fed
from tests.mpi.torch_models import assert_close, assert_same_on_all_ranks, loss, net, plain_sgd, sgd, train
from tests.ranks import ranks


def average(models: list[nn.Module]) -> list[torch.Tensor]:
    both = zip(*(model.parameters() for model in models), strict=True)
    return [sum(each) / len(models) for each in both]


def put(model: nn.Module, values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)


@ranks(2)
def test_models_are_averaged_every_few_steps_and_momentum_stays_local(hvd):
    model = net()
    optimizer = sgd(model.parameters())
    local = fed.LocalSGD(model, optimizer, every=3)
    train(optimizer, model, range(7), hvd.rank())
    assert local.steps == 7
    references = [net(), net()]
    optimizers = [sgd(reference.parameters()) for reference in references]
    for steps in (range(3), range(3, 6), range(6, 7)):
        for rank, reference in enumerate(references):
            train(optimizers[rank], reference, steps, rank)
        if len(steps) == 3:
            mean = average(references)
            for reference in references:
                put(reference, mean)
    assert_close(model, references[hvd.rank()])
    local.synchronize()
    put(references[0], average(references))
    assert_close(model, references[0])
    assert_same_on_all_ranks(hvd, model)


@ranks(2)
def test_between_averages_nothing_is_sent(hvd):
    model = net()
    optimizer = sgd(model.parameters())
    local = fed.LocalSGD(model, optimizer, every=4)
    before = hvd.stats().tensors
    train(optimizer, model, range(3), hvd.rank())
    assert hvd.stats().tensors == before
    train(optimizer, model, range(3, 4), hvd.rank())
    local.synchronize()  # Nothing has changed since.
    assert hvd.stats().tensors == before + 1


@ranks(2)
def test_the_first_steps_of_post_local_sgd_average_gradients(hvd):
    model, reference = net(), net()
    optimizer, own = sgd(model.parameters()), sgd(reference.parameters())
    fed.LocalSGD(model, optimizer, every=100, warmup_steps=3)
    train(optimizer, model, range(3), hvd.rank())
    for step in range(3):
        own.zero_grad()
        (sum(loss(reference, step, rank) for rank in range(2)) / 2).backward()
        own.step()
    assert_close(model, reference)
    assert_same_on_all_ranks(hvd, model)
    train(optimizer, model, range(3, 4), hvd.rank())
    train(own, reference, range(3, 4), hvd.rank())
    assert_close(model, reference)


@ranks(2)
def test_in_the_warm_up_a_parameter_that_no_rank_used_keeps_no_gradient(hvd):
    model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1), nn.Linear(2, 1)])
    optimizer = plain_sgd(model.parameters())
    fed.LocalSGD(model, optimizer, every=1, warmup_steps=1)
    model[hvd.rank()](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert model[0].weight.grad.tolist() == model[1].weight.grad.tolist() == [[0.5, 0.5]]
    assert model[2].weight.grad is None


@ranks(2)
def test_diloco_steps_nesterov_along_the_average_of_what_ranks_did(hvd):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    fed.DiLoCo(model, optimizer, every=2, outer_lr=0.7, outer_momentum=0.9)
    train(optimizer, model, range(6), hvd.rank())

    start = [parameter.detach().clone() for parameter in net().parameters()]
    references = [net(), net()]
    optimizers = [torch.optim.AdamW(reference.parameters(), lr=0.01) for reference in references]
    velocity = [torch.zeros_like(value) for value in start]
    for steps in (range(2), range(2, 4), range(4, 6)):
        for rank, reference in enumerate(references):
            put(reference, start)
            train(optimizers[rank], reference, steps, rank)
        for index, mean in enumerate(average(references)):
            gradient = start[index] - mean.detach()
            velocity[index] = 0.9 * velocity[index] + gradient
            start[index] = start[index] - 0.7 * (gradient + 0.9 * velocity[index])
    put(references[0], start)
    assert_close(model, references[0])
    assert_same_on_all_ranks(hvd, model)


@ranks(2)
def test_with_compression_ranks_agree_and_what_is_left_out_is_kept(hvd):
    model, dense = net(), net()
    optimizer = plain_sgd(model.parameters())
    local = fed.LocalSGD(model, optimizer, every=2, compression="topk:0.2")
    train(optimizer, model, range(2), hvd.rank())
    assert_same_on_all_ranks(hvd, model)
    memory = local.state_dict()["compression"][hvd.rank()]["memory"]
    plain = plain_sgd(dense.parameters())
    fed.LocalSGD(dense, plain, every=2)
    train(plain, dense, range(2), hvd.rank())
    for (name, parameter), whole in zip(model.named_parameters(), dense.parameters(), strict=True):
        # A residual is of start minus trained, which the ranks average.
        left_out = hvd.allreduce(memory[name]["residual"]).view_as(parameter)
        assert torch.allclose(parameter - left_out, whole, atol=1e-5)


@ranks(2)
def test_running_statistics_are_averaged(hvd):
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = plain_sgd(model.parameters())
    fed.LocalSGD(model, optimizer, every=1)
    with torch.no_grad():
        model[1].running_mean.fill_(float(hvd.rank()))
    model[1].num_batches_tracked.fill_(5 - hvd.rank())
    optimizer.step()
    assert model[1].running_mean.tolist() == [0.5] * 3
    assert model[1].num_batches_tracked.item() == 5


@ranks(2)
def test_a_restored_state_goes_on_as_if_nothing_had_happened(hvd):
    def make(model: nn.Module):
        optimizer = plain_sgd(model.parameters())
        return optimizer, fed.DiLoCo(model, optimizer, every=2, compression="topk:0.5")

    whole, first = net(), net()
    optimizer, _ = make(whole)
    train(optimizer, whole, range(5), hvd.rank())
    optimizer, local = make(first)
    train(optimizer, first, range(3), hvd.rank())
    kept, saved = copy.deepcopy(first.state_dict()), local.state_dict()
    second = net()
    optimizer, restored = make(second)
    second.load_state_dict(kept)
    restored.load_state_dict(saved)
    train(optimizer, second, range(3, 5), hvd.rank())
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))
    with pytest.raises(ValueError, match="of a model of"):
        fed.LocalSGD(nn.Linear(2, 2), plain_sgd(nn.Linear(2, 2).parameters()), every=2).load_state_dict(saved)


@ranks(2)
def test_closing_ends_the_averaging(hvd):
    model = net()
    optimizer = plain_sgd(model.parameters())
    fed.LocalSGD(model, optimizer, every=1).close()
    before = hvd.stats().tensors
    train(optimizer, model, range(2), hvd.rank())
    assert hvd.stats().tensors == before


@ranks(2)
def test_what_cannot_work_is_refused(hvd):
    model = net()
    with pytest.raises(ValueError, match="every"):
        fed.LocalSGD(model, sgd(model.parameters()), every=0)
    with pytest.raises(ValueError, match="outer_momentum"):
        fed.DiLoCo(model, sgd(model.parameters()), every=2, outer_momentum=1.0)
    with pytest.raises(ValueError, match="DistributedOptimizer"):
        fed.LocalSGD(model, hvd.DistributedOptimizer(sgd(model.parameters())), every=2)
    with pytest.raises(hvd.MismatchError, match=r"0\.weight"):
        fed.LocalSGD(nn.Sequential(nn.Linear(2, 1 + hvd.rank())), sgd(model.parameters()), every=2)
    with pytest.raises(hvd.MismatchError, match="every differs"):
        fed.LocalSGD(model, sgd(model.parameters()), every=2 + hvd.rank())
    optimizer = plain_sgd(model.parameters())
    fed.LocalSGD(model, optimizer, every=2, warmup_steps=1)
    with pytest.raises(ValueError, match="closure"):
        optimizer.step(lambda: loss(model, 0, 0))
