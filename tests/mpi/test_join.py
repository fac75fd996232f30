"""`join`: ranks with less data than others let them go on, and all learn who was last."""

from __future__ import annotations

import copy
from types import ModuleType

import pytest
import torch

from tests.mpi.plane import assert_same_bits, draw
from tests.ranks import ranks


@ranks(1, 2, 3)
def test_ranks_with_less_data_let_the_others_go_on(hvd: ModuleType) -> None:
    """Rank r has r + 1 batches."""
    for batch in range(hvd.rank() + 1):
        present = hvd.size() - batch
        value = torch.full((4,), 2.0)
        assert hvd.allreduce(value, op=hvd.Sum, name="sum").tolist() == [2.0 * present] * 4
        average = hvd.allreduce(value, name="average")
        torch.testing.assert_close(average, value * present / hvd.size())
        counts = hvd.grouped_allreduce([torch.ones(2, dtype=torch.int64)] * 2, op=hvd.Sum, name="group")
        assert [each.tolist() for each in counts] == [[present, present]] * 2
    last = hvd.join()
    assert hvd.allgather_object(last) == [hvd.size() - 1] * hvd.size()


@ranks(2, 3)
def test_a_joined_rank_changes_no_kind_of_reduction(hvd: ModuleType) -> None:
    if hvd.rank() == 1:
        last = hvd.join()
    else:
        others = [rank for rank in range(hvd.size()) if rank != 1]
        mine = torch.tensor([hvd.rank() - 5])
        assert hvd.allreduce(mine, op=hvd.Max, name="max").item() == others[-1] - 5
        assert hvd.allreduce(mine, op=hvd.Min, name="min").item() == -5
        assert hvd.allreduce(mine, op=hvd.Product, name="product").item() == (-5 if hvd.size() == 2 else 15)
        hvd.barrier()
        last = hvd.join()
    assert last != 1
    assert hvd.allgather_object(last) == [last] * hvd.size()


@ranks(2)
def test_what_needs_every_rank_is_an_error_that_names_the_joined_one(hvd: ModuleType) -> None:
    if hvd.rank() == 0:
        one = torch.ones(2)
        with pytest.raises(hvd.FusionError, match="'a2a': alltoall cannot run after rank 1 called join"):
            hvd.alltoall(one, name="a2a")
        with pytest.raises(hvd.FusionError, match="'rs': reducescatter cannot run after rank 1 "):
            hvd.reducescatter(one, name="rs")
        with pytest.raises(hvd.FusionError, match="'ada': adasum cannot run after rank 1 "):
            hvd.allreduce(one, op=hvd.Adasum, name="ada")
        with pytest.raises(hvd.FusionError, match="'rows': allgather cannot run after rank 1 "):
            hvd.allgather(one, name="rows")
        with pytest.raises(hvd.FusionError, match="'root': broadcast cannot run after rank 1 "):
            hvd.broadcast(one, 0, name="root")
        assert hvd.allreduce(one, op=hvd.Sum, name="after").tolist() == [1.0, 1.0]
    assert hvd.join() == 0


@ranks(2)
def test_all_go_on_together_after_a_join_again_and_again(hvd: ModuleType) -> None:
    for turn in range(6):
        first = turn % 2
        if hvd.rank() != first:
            assert hvd.allreduce(torch.ones(3), op=hvd.Sum, name="t").tolist() == [1.0] * 3
        assert hvd.join() == 1 - first
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum, name="t").tolist() == [2.0] * 3


@ranks(2, 3)
def test_an_optimizer_trains_on_uneven_data(hvd: ModuleType) -> None:
    """A rank with no batch left adds nothing to the gradients, whose average is over all ranks."""
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 2)
    alone = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        buckets="dynamic",
    )
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(hvd.size()):
        plain.zero_grad()
        for rank in range(step, hvd.size()):
            (alone(draw(rank, 8, 4, seed=step)).square().mean() / hvd.size()).backward()
        plain.step()
    for step in range(hvd.rank() + 1):
        optimizer.zero_grad()
        model(draw(hvd.rank(), 8, 4, seed=step)).square().mean().backward()
        optimizer.step()
    last = hvd.join()
    assert last == hvd.size() - 1
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    torch.testing.assert_close(model.state_dict(), alone.state_dict())
    assert_same_bits(*model.state_dict().values())
