"""`DistributedOptimizer` does what one process with all the data would do, in both kinds of buckets."""

from __future__ import annotations

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
    plain_sgd,
    sgd,
    total_loss,
    train,
    trained_alone,
)
from tests.ranks import ranks


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
