"""Training with compressed buckets: what is remembered, agreed and restored."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fusion.compression as fc
from tests.mpi.torch_models import (
    assert_close,
    assert_same_on_all_ranks,
    both,
    loss,
    net,
    plain_sgd,
    sgd,
    train,
    trained_alone,
)
from tests.ranks import ranks

METHODS = ["fp16", "bf16", "int8", "onebit:8", "terngrad", "topk:0.1", "randomk:0.2", "powersgd:1"]


def everything(method, rules=(), **options):
    """Compress every parameter of a small model."""
    return fc.Policy(method, rules, dense_below=0, dense_vectors=False, **options)


def wrapped(hvd, model, compression, make=plain_sgd, **options):
    return hvd.DistributedOptimizer(
        make(model.parameters()), model.named_parameters(), compression=compression, **options
    )


def residuals(optimizer):
    tensors = optimizer.state_dict()["compression"]["tensors"]
    return {name: kept["residual"] for name, kept in tensors.items() if "residual" in kept}


def total_residual(hvd, optimizer):
    """Over all ranks, by parameter."""
    return {name: hvd.allreduce(value, op=hvd.Sum) for name, value in sorted(residuals(optimizer).items())}


def same_residuals(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@ranks(2, 4)
def test_every_method_trains_and_gives_all_ranks_the_same_parameters(hvd):
    for method in METHODS:
        model = net()
        first = hvd.allreduce(loss(model, 0, hvd.rank()).detach())
        optimizer = wrapped(
            hvd, model, everything(method), lambda parameters: torch.optim.SGD(parameters, lr=0.02)
        )
        train(optimizer, model, [0] * 12, hvd.rank())
        assert_same_on_all_ranks(hvd, model)
        assert hvd.allreduce(loss(model, 0, hvd.rank()).detach()) < first, method


@ranks(2, 3)
@both
def test_what_loses_nothing_trains_as_one_process_does(hvd, buckets):
    for method in ["none", "topk:1.0", "randomk:1", "powersgd:4"]:
        model = net()
        train(wrapped(hvd, model, everything(method), sgd, buckets=buckets), model, range(4), hvd.rank())
        assert_close(model, trained_alone(hvd.size(), range(4)))


@ranks(2)
@pytest.mark.parametrize("threshold", [0, 100, 1 << 26])
def test_gradients_and_residuals_are_all_there_is_also_when_buckets_are_laid_out_anew(hvd, threshold):
    """The buckets of the first step are those of the model's order, later ones those of arrival."""
    model = nn.ModuleList([nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(6, 8)])
    optimizer = wrapped(hvd, model, everything("topk:0.05"))
    optimizer._window._carrier._threshold = threshold
    optimizer._window._carrier._lay_out()
    given, arrived = {}, {}
    for step in range(5):
        optimizer.zero_grad()
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + hvd.rank()))
        # Used in another order than they are registered in, so the order of arrival is new.
        hidden = model[2](inputs) * model[0](inputs).tanh() * model[1](inputs)
        plain = torch.autograd.grad(hidden.square().mean(), model.parameters(), retain_graph=True)
        for (name, _), gradient in zip(model.named_parameters(), plain, strict=True):
            given[name] = given.get(name, 0) + gradient
        hidden.square().mean().backward()
        optimizer.step()
        for name, parameter in model.named_parameters():
            arrived[name] = arrived.get(name, 0) + 2 * parameter.grad
    assert optimizer._window._carrier._generation == 1
    left = total_residual(hvd, optimizer)
    for name, value in arrived.items():
        expected = hvd.allreduce(given[name], op=hvd.Sum)
        assert torch.allclose(value + left[name].view_as(value), expected, atol=1e-5), name


@ranks(2)
def test_gradients_that_are_thrown_away_leave_the_residuals_as_they_were(hvd):
    model = net()
    optimizer = wrapped(hvd, model, everything("topk:0.1"))
    train(optimizer, model, range(2), hvd.rank())
    before = residuals(optimizer)
    loss(model, 5, hvd.rank()).backward()
    optimizer.zero_grad()
    assert same_residuals(residuals(optimizer), before)
    train(optimizer, model, range(2), hvd.rank())
    assert not same_residuals(residuals(optimizer), before)


@ranks(2)
def test_a_step_that_overflows_on_one_rank_is_seen_by_all_and_remembered_by_none(hvd):
    for method in METHODS:
        model = net()
        optimizer = wrapped(hvd, model, everything(method + (",feedback=on" if ":" in method else "")))
        train(optimizer, model, range(2), hvd.rank())
        before = residuals(optimizer)
        optimizer.zero_grad()
        scale = float("inf") if hvd.rank() == 0 else 1.0
        (loss(model, 3, hvd.rank()) * scale).backward()
        optimizer.synchronize()
        assert any(not parameter.grad.isfinite().all() for parameter in model.parameters()), method
        assert same_residuals(residuals(optimizer), before), method
        optimizer.zero_grad()
        train(optimizer, model, [4], hvd.rank())
        assert all(parameter.isfinite().all() for parameter in model.parameters()), method


@ranks(2)
def test_a_parameter_that_no_rank_used_keeps_its_gradient_and_its_residual(hvd):
    model = nn.ModuleList([nn.Linear(6, 5), nn.Linear(6, 5)])
    optimizer = wrapped(hvd, model, everything("topk:0.1"))
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(hvd.rank()))
    (model[0](inputs) * model[1](inputs)).mean().backward()
    optimizer.step()
    before = residuals(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        model[0](inputs).square().mean().backward()
        optimizer.step()
        assert model[1].weight.grad is None
    after = residuals(optimizer)
    assert torch.equal(after["1.weight"], before["1.weight"])
    assert not torch.equal(after["0.weight"], before["0.weight"])


@ranks(2)
def test_a_parameter_that_one_rank_used_is_reduced_on_both(hvd):
    model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = wrapped(hvd, model, everything("topk:1.0"))
    for _ in range(2):
        optimizer.zero_grad()
        model[hvd.rank()](torch.ones(1, 3)).sum().backward()
        optimizer.step()
        assert torch.equal(model[0].weight.grad, torch.full((2, 3), 0.5))
        assert torch.equal(model[1].bias.grad, torch.full((2,), 0.5))
    assert_same_on_all_ranks(hvd, model)


@ranks(2)
def test_nothing_is_compressed_during_warm_up(hvd):
    model = net()
    optimizer = wrapped(hvd, model, everything("topk:0.05", warmup_steps=3), sgd)
    train(optimizer, model, range(3), hvd.rank())
    assert_close(model, trained_alone(2, range(3)))
    assert residuals(optimizer) == {}
    before = hvd.stats()
    train(optimizer, model, [3], hvd.rank())
    assert hvd.stats().since(before).compressed_bytes > 0
    assert residuals(optimizer)


@ranks(2)
def test_rules_decide_what_is_compressed_and_by_what(hvd):
    model = net()
    optimizer = wrapped(hvd, model, everything("topk:0.05", {"*.bias": "none", "3.*": "int8"}))
    before = hvd.stats()
    train(optimizer, model, [0], hvd.rank())
    done = hvd.stats().since(before)
    weights = [parameter.numel() for name, parameter in model.named_parameters() if name.endswith("weight")]
    assert done.compressed_bytes == 4 * sum(weights)
    assert set(residuals(optimizer)) == {"0.weight", "2.weight"}
    assert_same_on_all_ranks(hvd, model)


@ranks(2)
def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_been_interrupted(hvd):
    policy = everything("topk:0.1", warmup_steps=1)
    model, other = net(), net()
    optimizer = wrapped(hvd, model, policy, sgd)
    train(optimizer, model, range(3), hvd.rank())
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    train(optimizer, model, range(3, 6), hvd.rank())
    other.load_state_dict(weights)
    restored = wrapped(hvd, other, policy, sgd)
    restored.load_state_dict(saved)
    train(restored, other, range(3, 6), hvd.rank())
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@ranks(2)
def test_residuals_of_another_rank_are_left_out_with_a_warning(hvd):
    model = net()
    optimizer = wrapped(hvd, model, everything("topk:0.1"))
    train(optimizer, model, range(2), hvd.rank())
    state = hvd.broadcast_object(optimizer.state_dict(), 0)
    if hvd.rank() == 0:
        optimizer.load_state_dict(state)
        assert residuals(optimizer)
    else:
        with pytest.warns(UserWarning, match="residuals of rank 0 of 2, and this is rank 1 of 2"):
            optimizer.load_state_dict(state)
        assert residuals(optimizer) == {}


@ranks(2)
def test_broadcasting_the_state_leaves_every_rank_its_residuals(hvd):
    model = net()
    optimizer = wrapped(hvd, model, everything("topk:0.1", warmup_steps=1), sgd)
    train(optimizer, model, range(2), hvd.rank())
    before = residuals(optimizer)
    if hvd.rank() == 1:
        optimizer._compressing.steps = 0
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert same_residuals(residuals(optimizer), before)
    assert optimizer.state_dict()["compression"]["steps"] == 2


@ranks(2)
def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(hvd):
    model = net()
    optimizer = wrapped(hvd, model, everything("topk:0.1"))
    train(optimizer, model, range(2), hvd.rank())
    before = residuals(optimizer)
    state = optimizer.state_dict()
    state["compression"]["tensors"]["0.weight"]["residual"] = torch.zeros(3)
    with pytest.raises(ValueError, match="has 3 elements"):
        optimizer.load_state_dict(state)
    assert same_residuals(residuals(optimizer), before)
    plain = torch.optim.SGD(net().parameters(), lr=0.1)
    plain.load_state_dict(optimizer.state_dict())  # A plain optimizer takes it too.


@ranks(2)
def test_optimizers_that_compress_differently_are_told_both(hvd):
    model = net()
    optimizer = wrapped(hvd, model, [fc.topk(0.1), hvd.Compression.none][hvd.rank()])
    loss(model, 0, hvd.rank()).backward()
    with pytest.raises(hvd.MismatchError, match=r"rank 0: .*topk:ratio=0.1.*rank 1: .*none"):
        optimizer.step()
    hvd.allreduce(torch.ones(3))


@ranks(3)
def test_a_process_set_compresses_by_itself(hvd):
    pair = hvd.add_process_set([0, 2])
    model = net()
    optimizer = wrapped(hvd, model, everything("topk:1.0"), process_set=pair)
    train(optimizer, model, range(2), hvd.rank())
    if pair.included():
        for value in model.parameters():
            assert torch.equal(value, hvd.broadcast(value.detach(), 0, process_set=pair))
    hvd.remove_process_set(pair)


@ranks(2)
def test_gradients_can_be_clipped_before_or_after(hvd):
    model = net()
    optimizer = wrapped(hvd, model, everything("topk:0.5"))
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))  # Before.
    loss(model, 0, hvd.rank()).backward()
    optimizer.synchronize()
    assert max(float(parameter.grad.abs().max()) for parameter in model.parameters()) <= 1.001e-3
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-5)  # After.
    with optimizer.skip_synchronize():
        optimizer.step()
    assert_same_on_all_ranks(hvd, model)


@ranks(2)
def test_several_backward_passes_and_other_dtypes(hvd):
    model = nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4).bfloat16())
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = wrapped(hvd, model, everything("int8"), backward_passes_per_step=2)
    for _ in range(2):
        optimizer.zero_grad()
        for part in range(2):
            model(torch.full((2, 4), 1.0 + part + hvd.rank(), dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    assert_same_on_all_ranks(hvd, model)


@ranks(2)
def test_what_cannot_be_is_refused(hvd):
    model = net()
    for arguments, message in (
        ({"op": hvd.Max}, "needs op=Average or op=Sum, not Max"),
        ({"groups": 2}, "groups= cannot be used with a bucket compressor"),
    ):
        with pytest.raises(ValueError, match=message):
            wrapped(hvd, model, "topk:0.1", **arguments)
    with pytest.raises(ValueError, match="there is no compressor"):
        wrapped(hvd, model, "zip")
    with pytest.raises(TypeError, match="is none"):
        wrapped(hvd, model, 3)


@ranks(2)
@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients_go_beside_the_buckets_or_in_them(hvd, as_dense):
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 3))
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = wrapped(hvd, model, everything("topk:1.0"), sparse_as_dense=as_dense)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.tensor([1, 2 + hvd.rank()])).sum().backward()
        optimizer.step()
        assert model[0].weight.grad.is_sparse
    assert_same_on_all_ranks(hvd, model)
