"""`DistributedOptimizer` does what one process with all the data would do, in both kinds of buckets."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from torch import nn

from tests.mpi.torch_models import (
    assert_close,
    assert_same_on_all_ranks,
    both,
    loss,
    net,
    sgd,
    total_loss,
    train,
    trained_alone,
)
from tests.ranks import ranks


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


@ranks(1, 2, 3)
@both
def test_training_equals_one_process_with_all_data(hvd, buckets):
    model = net()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), buckets=buckets)
    train(optimizer, model, range(4), hvd.rank())
    assert_close(model, trained_alone(hvd.size(), range(4)))
    assert_same_on_all_ranks(hvd, model)


@ranks(2)
@both
@pytest.mark.parametrize("arguments", [{}, {"set_to_none": True}, {"set_to_none": False}], ids=str)
def test_every_way_to_zero_gradients(hvd, buckets, arguments):
    model = net()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), buckets=buckets)
    for step in range(3):
        optimizer.zero_grad(**arguments)
        loss(model, step, hvd.rank()).backward()
        optimizer.step()
    assert_close(model, trained_alone(2, range(3)))


@ranks(2)
@both
@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_model_may_zero_gradients_after_a_step(hvd, buckets, set_to_none):
    model = net()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), buckets=buckets)
    for step in range(3):
        model.zero_grad(set_to_none)
        loss(model, step, hvd.rank()).backward()
        optimizer.step()
    assert_close(model, trained_alone(2, range(3)))


@ranks(2)
@both
def test_a_parameter_unused_on_a_rank_gets_the_sum_over_the_size(hvd, buckets):
    used_here, used_there, used_nowhere = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)
    model = nn.ModuleList([used_here, used_there, used_nowhere])
    hvd.broadcast_parameters(model.state_dict(), 0)
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    optimizer = hvd.DistributedOptimizer(base, model.named_parameters(), buckets=buckets)
    before = used_nowhere.weight.detach().clone()
    for _ in range(3):
        optimizer.zero_grad()
        model[hvd.rank()](torch.ones(1, 3)).sum().backward()
        optimizer.step()
        assert torch.equal(used_here.weight.grad, torch.full((2, 3), 0.5))
        assert torch.equal(used_there.bias.grad, torch.full((2,), 0.5))
        assert used_nowhere.weight.grad is None
    assert torch.equal(used_nowhere.weight, before)
    assert_same_on_all_ranks(hvd, model)


@ranks(2)
@both
def test_zero_grad_after_backward_drops_what_is_in_flight(hvd, buckets):
    model = net()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), buckets=buckets)
    loss(model, 9, hvd.rank()).backward()
    optimizer.zero_grad()
    loss(model, 0, hvd.rank()).backward()
    optimizer.step()
    assert_close(model, trained_alone(2, [0]))


@ranks(2, 3)
@both
def test_a_second_backward_adds_to_the_first_as_in_plain_torch(hvd, buckets):
    model, reference = net(), net()
    base = plain_sgd(model.parameters())
    optimizer = hvd.DistributedOptimizer(base, model.named_parameters(), buckets=buckets, op=hvd.Sum)
    alone = plain_sgd(reference.parameters())
    for pair in ((0, 1), (2, 3)):  # Nothing is zeroed between the steps either.
        for step in pair:
            loss(model, step, hvd.rank()).backward()
            total_loss(reference, step, hvd.size()).backward()
        optimizer.step()
        alone.step()
        assert_close(model, reference)
    assert_same_on_all_ranks(hvd, model)


@ranks(2)
@both
def test_ranks_may_run_backward_different_numbers_of_times(hvd, buckets):
    model, reference = net(), net()
    optimizer = hvd.DistributedOptimizer(plain_sgd(model.parameters()), buckets=buckets, op=hvd.Sum)
    loss(model, 0, hvd.rank()).backward()
    if hvd.rank() == 0:
        loss(model, 1, 0).backward()
    optimizer.step()
    (total_loss(reference, 0, 2) + loss(reference, 1, 0)).backward()
    plain_sgd(reference.parameters()).step()
    assert_close(model, reference)


@ranks(2)
@both
def test_clipping_uses_the_reduced_gradients_once(hvd, buckets):
    model, reference = net(), net()
    base = plain_sgd(model.parameters())
    optimizer = hvd.DistributedOptimizer(base, model.named_parameters(), buckets=buckets, op=hvd.Sum)
    loss(model, 0, hvd.rank()).backward()
    optimizer.synchronize()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    reduced = hvd.stats().tensors
    with warnings.catch_warnings(), optimizer.skip_synchronize():
        warnings.simplefilter("error")
        optimizer.step()
    assert hvd.stats().tensors == reduced
    total_loss(reference, 0, 2).backward()
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    plain_sgd(reference.parameters()).step()
    assert torch.allclose(norm, expected)
    assert_close(model, reference)


@ranks(2)
@both
def test_step_after_synchronize_warns_and_does_not_reduce_again(hvd, buckets):
    model, reference = net(), net()
    optimizer = hvd.DistributedOptimizer(plain_sgd(model.parameters()), buckets=buckets, op=hvd.Sum)
    loss(model, 0, hvd.rank()).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="without optimizer.skip_synchronize"):
        optimizer.step()
    total_loss(reference, 0, 2).backward()
    plain_sgd(reference.parameters()).step()
    assert_close(model, reference)


@ranks(2)
@both
def test_clipping_without_synchronize_is_an_error_that_says_what_to_do(hvd, buckets):
    model = net()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), buckets=buckets)
    loss(model, 0, hvd.rank()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-6)
    with pytest.raises(hvd.FusionError, match=r"0.bias.*synchronize\(\) after backward"):
        optimizer.step()
    train(optimizer, model, range(2), hvd.rank())
    assert_close(model, trained_alone(2, range(2)))


@ranks(2)
@both
def test_passes_are_added_up_and_a_short_window_is_flushed(hvd, buckets):
    model, reference = net(), net()
    base = plain_sgd(model.parameters())
    optimizer = hvd.DistributedOptimizer(base, backward_passes_per_step=4, buckets=buckets)
    alone = plain_sgd(reference.parameters())
    for _epoch in range(2):
        for step in range(10):
            (loss(model, step, hvd.rank()) / 4).backward()
            (total_loss(reference, step, 2) / 8).backward()
            if step % 4 == 3 or step == 9:
                optimizer.step()
                optimizer.zero_grad()
                alone.step()
                alone.zero_grad()
    assert_close(model, reference)
    assert_same_on_all_ranks(hvd, model)


@ranks(2)
@both
def test_gradients_travel_only_after_the_last_pass(hvd, buckets):
    model = net()
    optimizer = hvd.DistributedOptimizer(
        plain_sgd(model.parameters()), backward_passes_per_step=2, buckets=buckets
    )
    before = hvd.stats().tensors
    loss(model, 0, hvd.rank()).backward()
    hvd.barrier()
    assert hvd.stats().tensors == before
    optimizer.set_backward_passes_per_step(1)
    assert optimizer.backward_passes_per_step == 1
    optimizer.step()
    assert hvd.stats().tensors > before


@ranks(2)
@both
def test_passes_can_be_averaged(hvd, buckets):
    model, reference = net(), net()
    optimizer = hvd.DistributedOptimizer(
        plain_sgd(model.parameters()),
        backward_passes_per_step=2,
        average_aggregated_gradients=True,
        buckets=buckets,
    )
    for step in range(2):
        loss(model, step, hvd.rank()).backward()
        (total_loss(reference, step, 2) / 4).backward()
    optimizer.step()
    plain_sgd(reference.parameters()).step()
    assert_close(model, reference)


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
