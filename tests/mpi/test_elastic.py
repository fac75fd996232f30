"""Horovod's elastic interface with ranks that stay, and what it says when one is lost."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from tests.mpi.torch_models import assert_same_on_all_ranks, net, sgd, train
from tests.ranks import ranks


@ranks(2)
def test_state_is_that_of_rank_0_and_can_be_put_back(hvd: ModuleType) -> None:
    model = net()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    with torch.no_grad():
        model[0].bias.fill_(hvd.rank() + 1.0)
    state = hvd.elastic.TorchState(model, optimizer, epoch=5 + hvd.rank(), note=["a"])

    @hvd.elastic.run
    def work(state: object, steps: int) -> int:
        assert (model[0].bias == 1).all() and state.epoch == 5
        train(optimizer, model, range(steps), hvd.rank())
        state.epoch += 1
        state.note.append("b")
        state.commit()
        return state.epoch

    assert work(state, 2) == 6
    committed = [parameter.detach().clone() for parameter in model.parameters()]
    train(optimizer, model, range(2), hvd.rank())
    state.epoch = 99
    state.note.clear()
    state.restore()
    assert state.epoch == 6 and state.note == ["a", "b"]
    for parameter, value in zip(model.parameters(), committed, strict=True):
        assert torch.equal(parameter, value)
    train(optimizer, model, [0], hvd.rank())
    assert_same_on_all_ranks(hvd, model)


@ranks(2)
def test_a_failed_collective_puts_the_state_back_and_says_that_ranks_are_not_replaced(
    hvd: ModuleType,
) -> None:
    state = hvd.elastic.ObjectState(batch=3)

    @hvd.elastic.run
    def work(state: object) -> None:
        state.batch = 8
        hvd.allreduce(torch.ones(hvd.rank() + 1), name="uneven")

    with pytest.raises(hvd.HorovodInternalError, match="uneven") as caught:
        work(state)
    assert state.batch == 3
    assert any("does not replace lost ranks" in note for note in caught.value.__notes__)


@ranks(2)
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_sampler_shares_out_what_is_left(hvd: ModuleType, shuffle: bool) -> None:
    sampler = hvd.elastic.ElasticSampler(range(11), shuffle=shuffle)
    sampler.set_epoch(1)
    first = list(sampler)
    assert len(first) == len(sampler) == 6
    assert {i for each in hvd.allgather_object(first) for i in each} == set(range(11))
    sampler.record_batch(0, 2)
    again = hvd.elastic.ElasticSampler(range(11), shuffle=shuffle)
    again.load_state_dict(sampler.state_dict())
    done = {i for each in hvd.allgather_object(first[:2]) for i in each}
    rest = {i for each in hvd.allgather_object(list(again)) for i in each}
    assert len(again) == 4 and done | rest == set(range(11)) and not done & rest
