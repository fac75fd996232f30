"""SyncBatchNorm: every rank together does what one process does with the batches of all."""

from __future__ import annotations

import copy
from types import ModuleType

import pytest
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from tests.mpi.plane import assert_same_bits, draw
from tests.ranks import ranks

C = 3
PLAIN = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d, 5: torch.nn.BatchNorm3d}
SHAPES = {2: (C,), 3: (C, 5), 4: (C, 4, 3), 5: (C, 2, 3, 2)}


def batch(rank: int, dims: int, *, rows: int | None = None, seed: int = 0) -> torch.Tensor:
    """What a rank feeds: a different number of rows on each, around different means."""
    rows = 2 + rank if rows is None else rows
    return draw(rank, rows, *SHAPES[dims], dtype=torch.float64, seed=seed) * (1 + rank) + 10 * rank


def twins(hvd: ModuleType, dims: int, **options: object) -> tuple[_BatchNorm, _BatchNorm]:
    """A SyncBatchNorm and the plain one, with equal parameters."""
    plain = PLAIN[dims](C, **options).double()
    if plain.affine:
        torch.manual_seed(7)
        torch.nn.init.normal_(plain.weight)
        torch.nn.init.normal_(plain.bias)
    synced = hvd.SyncBatchNorm(C, **options).double()
    synced.load_state_dict(plain.state_dict())
    return synced, plain


def assert_like_one_process(hvd: ModuleType, synced: _BatchNorm, plain: _BatchNorm, batches: list) -> None:
    """Output, state and all gradients of one training step agree."""
    everything = torch.cat(batches).requires_grad_()
    mine = batches[hvd.rank()].clone().requires_grad_()
    weights = torch.cat([draw(rank, *each.shape, dtype=each.dtype) for rank, each in enumerate(batches)])
    begin = sum(map(len, batches[: hvd.rank()]))
    rows = slice(begin, begin + len(mine))
    whole, part = plain(everything), synced(mine)
    torch.testing.assert_close(part, whole[rows])
    assert part.dtype == mine.dtype
    torch.testing.assert_close(synced.state_dict(), plain.state_dict())
    (whole * weights).sum().backward()
    (part * weights[rows]).sum().backward()
    torch.testing.assert_close(mine.grad, everything.grad[rows])
    for own, its in zip(synced.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(hvd.allreduce(own.grad, op=hvd.Sum), its.grad)


@ranks(1, 2, 3)
@pytest.mark.parametrize("dims", [2, 3, 4, 5])
def test_training_is_that_of_one_process_with_all_batches(hvd: ModuleType, dims: int) -> None:
    synced, plain = twins(hvd, dims)
    for seed in range(2):
        synced.zero_grad()
        plain.zero_grad()
        batches = [batch(rank, dims, seed=seed) for rank in range(hvd.size())]
        assert_like_one_process(hvd, synced, plain, batches)
    if hvd.size() > 1:
        assert_same_bits(synced.running_mean, synced.running_var)


@ranks(2)
@pytest.mark.parametrize(
    "options", [{"affine": False}, {"momentum": None}, {"track_running_stats": False}, {"eps": 0.1}], ids=str
)
def test_options_mean_what_they_mean_for_batch_norm(hvd: ModuleType, options: dict) -> None:
    synced, plain = twins(hvd, 4, **options)
    for seed in range(2):
        synced.zero_grad()
        plain.zero_grad()
        assert_like_one_process(hvd, synced, plain, [batch(rank, 4, seed=seed) for rank in (0, 1)])


@ranks(2)
def test_one_value_a_channel_on_each_rank_or_none_on_some_is_enough(hvd: ModuleType) -> None:
    assert_like_one_process(hvd, *twins(hvd, 2), [batch(rank, 2, rows=1) for rank in (0, 1)])
    assert_like_one_process(hvd, *twins(hvd, 4), [batch(0, 4, rows=4), batch(1, 4, rows=0)])


@ranks(2)
def test_one_value_a_channel_in_all_is_an_error_on_every_rank(hvd: ModuleType) -> None:
    synced, _ = twins(hvd, 2)
    with pytest.raises(ValueError, match="more than one value a channel"):
        synced(batch(hvd.rank(), 2, rows=hvd.rank()))


@ranks(2)
def test_eval_mode_uses_the_running_statistics_and_sends_nothing(hvd: ModuleType) -> None:
    synced, plain = twins(hvd, 4)
    synced(batch(hvd.rank(), 4))
    plain.load_state_dict(synced.state_dict())
    synced.eval()
    plain.eval()
    if hvd.rank() == 0:
        torch.testing.assert_close(synced(batch(5, 4)), plain(batch(5, 4)))
    hvd.barrier()


@ranks(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_inputs_keep_their_dtype_and_are_computed_in_float32(
    hvd: ModuleType, dtype: torch.dtype
) -> None:
    layer = hvd.SyncBatchNorm(C)
    mine = batch(hvd.rank(), 4).to(dtype).requires_grad_()
    output = layer(mine)
    output.sum().backward()
    both = torch.cat([batch(rank, 4).to(dtype).double() for rank in (0, 1)])
    exact = torch.nn.BatchNorm2d(C).double()(both)[2 * hvd.rank() :][: len(mine)]
    assert output.dtype == mine.grad.dtype == dtype
    assert layer.running_mean.dtype == layer.weight.grad.dtype == torch.float32
    torch.testing.assert_close(output, exact.to(dtype))


@ranks(2)
def test_inputs_far_from_zero_lose_no_precision(hvd: ModuleType) -> None:
    mine = (draw(hvd.rank(), 1000, C) + 1000).requires_grad_()
    variance = hvd.allgather(mine.detach()).double().var(0)
    layer = hvd.SyncBatchNorm(C, momentum=1.0)
    layer(mine)
    torch.testing.assert_close(layer.running_var.double(), variance, rtol=1e-6, atol=0)


@ranks(2)
def test_strides_are_of_no_concern_and_inputs_without_gradient_send_nothing_back(hvd: ModuleType) -> None:
    synced, plain = twins(hvd, 4)
    batches = [batch(rank, 4).to(memory_format=torch.channels_last) for rank in (0, 1)]
    assert_like_one_process(hvd, synced, plain, batches)
    synced.zero_grad()
    synced(batches[hvd.rank()]).sum().backward()
    assert synced.bias.grad.tolist() == [float(batches[hvd.rank()][:, 0].numel())] * C


@ranks(2)
def test_a_model_is_converted_copied_and_compiled(hvd: ModuleType) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, C), torch.nn.BatchNorm1d(C), torch.nn.ReLU())
    state = copy.deepcopy(model.state_dict())
    model = copy.deepcopy(hvd.SyncBatchNorm.convert_sync_batchnorm(model))
    assert isinstance(model[1], hvd.SyncBatchNorm)
    torch.testing.assert_close(model.state_dict(), state)
    compiled = torch.compile(model, backend="eager")
    compiled(draw(hvd.rank(), 5, 4)).sum().backward()
    assert_same_bits(model[1].running_var)


@ranks(2)
def test_what_is_no_batch_of_the_layers_channels_is_refused(hvd: ModuleType) -> None:
    layer = hvd.SyncBatchNorm(C)
    with pytest.raises(ValueError, match="2 dimensions"):
        layer(torch.ones(C))
    with pytest.raises(ValueError, match="3 channels, but the input has 4"):
        layer(torch.ones(2, 4))


@ranks(3)
def test_statistics_are_those_of_the_process_set(hvd: ModuleType) -> None:
    pair = hvd.add_process_set([0, 2])
    if pair.included():
        layer = hvd.SyncBatchNorm(C, process_set=pair)
        layer(batch(hvd.rank(), 4))
        expected = torch.cat([batch(0, 4), batch(2, 4)]).float()
        torch.testing.assert_close(layer.running_mean, expected.mean((0, 2, 3)) * 0.1)
    hvd.remove_process_set(pair)
