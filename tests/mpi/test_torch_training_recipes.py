"""What training loops do with a `DistributedOptimizer`: several at once, scaling, penalties, closures."""

from __future__ import annotations

import gc

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
    trained_alone,
)
from tests.ranks import ranks


@ranks(2)
@both
def test_two_networks_train_against_each_other(hvd, buckets):
    def run(size: int, wrap) -> tuple[nn.Module, nn.Module]:
        generator, critic = net(), nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
        with torch.no_grad():
            for number, parameter in enumerate(critic.parameters()):
                parameter.fill_(0.1 * (number + 1))
        first, second = wrap(sgd(generator.parameters())), wrap(sgd(critic.parameters()))
        for step in range(3):
            noise = [torch.full((2, 6), 0.1 * (step + rank + 1)) for rank in range(2)]
            mine = noise if size == 1 else [noise[hvd.rank()]]
            first.zero_grad()
            (sum(critic(generator(z)).mean() for z in mine) / len(mine)).backward()
            first.step()
            second.zero_grad()
            gaps = [critic(z[:, :2]).mean() - critic(generator(z).detach()).mean() for z in mine]
            (sum(gaps) / len(mine)).backward()
            second.step()
        return generator, critic

    trained = run(2, lambda optimizer: hvd.DistributedOptimizer(optimizer, buckets=buckets))
    alone = run(1, lambda optimizer: optimizer)
    for model, reference in zip(trained, alone, strict=True):
        assert_close(model, reference)
        assert_same_on_all_ranks(hvd, model)


@ranks(2)
@both
def test_a_parameter_of_two_optimizers_is_reduced_once(hvd, buckets):
    model, reference = net(), net()
    options = {"op": hvd.Sum, "buckets": buckets}
    whole = hvd.DistributedOptimizer(plain_sgd(model.parameters()), model.named_parameters(), **options)
    part = hvd.DistributedOptimizer(plain_sgd(model[0].parameters()), model[0].named_parameters(), **options)
    hvd.broadcast_optimizer_state(whole, 0)
    hvd.broadcast_optimizer_state(part, 0)
    alone = [plain_sgd(reference.parameters()), plain_sgd(reference[0].parameters())]
    for step, turn in enumerate([0, 0, 1, 1, 0]):
        model.zero_grad()
        reference.zero_grad()
        loss(model, step, hvd.rank()).backward()
        total_loss(reference, step, 2).backward()
        (whole, part)[turn].step()
        alone[turn].step()
    assert_close(model, reference)


@ranks(2)
@both
def test_an_optimizer_that_is_gone_reduces_no_more(hvd, buckets):
    model = net()
    for _ in range(2):
        optimizer = hvd.DistributedOptimizer(
            sgd(model.parameters()), model.named_parameters(), buckets=buckets
        )
        del optimizer
        gc.collect()
    before = hvd.stats().tensors
    loss(model, 0, hvd.rank()).backward()
    hvd.barrier()
    assert hvd.stats().tensors == before


@ranks(2)
@both
def test_wrapping_an_optimizer_again_replaces_the_wrapper(hvd, buckets):
    model = net()
    base = sgd(model.parameters())
    hvd.DistributedOptimizer(base, buckets=buckets)
    optimizer = hvd.DistributedOptimizer(base, buckets=buckets)
    train(optimizer, model, range(2), hvd.rank())
    assert_close(model, trained_alone(2, range(2)))
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(optimizer)


@ranks(2)
@both
@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_sees_reduced_gradients_and_skips_alike_on_all_ranks(hvd, buckets, fused):
    model = net()
    base = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, fused=fused
    )  # Fused ones unscale by themselves.
    optimizer = hvd.DistributedOptimizer(base, model.named_parameters(), buckets=buckets)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        optimizer.zero_grad()
        value = loss(model, step, hvd.rank())
        if step == 1 and hvd.rank() == 1:
            value = value * float("inf")
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
    assert_close(model, trained_alone(2, [0, 2]))
    assert hvd.allgather_object(scaler.get_scale()) == [512.0] * 2


@ranks(2)
@both
def test_the_recipe_for_scaling_and_clipping_equals_one_process(hvd, buckets):
    model, reference = net(), net()
    optimizer = hvd.DistributedOptimizer(plain_sgd(model.parameters()), buckets=buckets)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss(model, 0, hvd.rank())).backward()
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()
    (total_loss(reference, 0, 2) / 2).backward()
    nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    plain_sgd(reference.parameters()).step()
    assert_close(model, reference)


@ranks(2)
@both
def test_a_gradient_penalty_reduces_once(hvd, buckets):
    model, reference = net(), net()
    optimizer = hvd.DistributedOptimizer(plain_sgd(model.parameters()), buckets=buckets)

    def penalty(network: nn.Module, rank: int) -> torch.Tensor:
        inputs = torch.full((3, 6), 0.3 + rank, requires_grad=True)
        (slope,) = torch.autograd.grad(network(inputs).sum(), inputs, create_graph=True)
        return (slope.norm() - 1) ** 2

    value = penalty(model, hvd.rank())
    before = hvd.stats().tensors
    hvd.barrier()
    assert hvd.stats().tensors == before
    value.backward()
    optimizer.step()
    ((penalty(reference, 0) + penalty(reference, 1)) / 2).backward()
    plain_sgd(reference.parameters()).step()
    assert_close(model, reference)


@ranks(2)
@both
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_backward_with_create_graph_works(hvd, buckets):
    def penalised(network: nn.Module, value: torch.Tensor) -> None:
        value.backward(create_graph=True)
        sum((p.grad**2).sum() for p in network.parameters() if p.grad is not None).backward()

    model, reference = net(), net()
    optimizer = hvd.DistributedOptimizer(plain_sgd(model.parameters()), buckets=buckets)
    penalised(model, loss(model, 0, hvd.rank()))
    optimizer.step()
    gradients = []
    for rank in range(2):
        reference.zero_grad()
        penalised(reference, loss(reference, 0, rank))
        gradients.append([p.grad.detach().clone() for p in reference.parameters()])
    with torch.no_grad():
        for parameter, a, b in zip(reference.parameters(), *gradients, strict=True):
            parameter.sub_(0.1 * (a + b) / 2)
    assert_close(model, reference)


@ranks(2)
@both
def test_closures_are_reduced_after_each_evaluation(hvd, buckets):
    def make(parameters):
        return torch.optim.LBFGS(parameters, lr=0.5, max_iter=3, line_search_fn="strong_wolfe")

    model, reference = net(), net()
    optimizer = hvd.DistributedOptimizer(make(model.parameters()), buckets=buckets)
    alone = make(reference.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model, 0, hvd.rank())
        value.backward()
        return value

    def closure_alone() -> torch.Tensor:
        alone.zero_grad()
        value = total_loss(reference, 0, 2) / 2
        value.backward()
        return value

    for _ in range(2):
        optimizer.step(closure)
        alone.step(closure_alone)
    assert_close(model, reference, 1e-3)
    assert_same_on_all_ranks(hvd, model)
