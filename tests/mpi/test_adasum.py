"""Adasum: the collective against its formula, the operation, and the optimizer that combines changes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import ModuleType

import pytest
import torch

from coordinator.messages import ReduceOp
from tests.mpi.plane import Plane, assert_same_bits, draw
from tests.ranks import ranks

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The formula for two vectors."""
    ab = (a * b).sum()
    weights = [1 - ab / (2 * norm) if norm else 1 for norm in ((a * a).sum(), (b * b).sum())]
    return a * weights[0] + b * weights[1]


def expected(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The formula for a power of two of vectors, neighbours first."""
    left = [vector.double() for vector in vectors]
    while len(left) > 1:
        left = [pair(a, b) for a, b in zip(left[::2], left[1::2], strict=True)]
    return left[0]


def everyones(
    hvd: ModuleType, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> torch.Tensor:
    return expected([draw(rank, *shape, dtype=dtype, seed=seed) for rank in range(hvd.size())])


@ranks(1, 2, 4)
@pytest.mark.parametrize("arrangement", ["one node", "a node each"])
def test_the_collective_computes_the_formula_for_any_length(hvd: ModuleType, arrangement: str) -> None:
    plane = Plane(arrangement)
    for count in (0, 1, 7, 200_003):
        (result,) = plane.allreduce([draw(plane.rank, count)], ReduceOp.ADASUM)
        torch.testing.assert_close(result, everyones(hvd, count).float())
        assert_same_bits(result)
    plane.close()


@ranks(2, 4)
def test_each_tensor_of_a_response_is_weighed_by_itself(hvd: ModuleType) -> None:
    plane = Plane("one node")
    shapes = [(3,), (0,), (50, 7), (), (1001,)]
    results = plane.allreduce(
        [draw(plane.rank, *shape, seed=n) for n, shape in enumerate(shapes)], ReduceOp.ADASUM
    )
    for n, (shape, result) in enumerate(zip(shapes, results, strict=True)):
        torch.testing.assert_close(result, everyones(hvd, *shape, seed=n).float())
    assert_same_bits(*results)
    plane.close()


@ranks(1, 2, 4)
@pytest.mark.parametrize("dtype", FLOATS)
def test_it_is_rounded_once(hvd: ModuleType, dtype: torch.dtype) -> None:
    mine = draw(hvd.rank(), 9000, dtype=dtype)
    result = hvd.allreduce(mine, op=hvd.Adasum)
    assert result.dtype == dtype
    exact = everyones(hvd, 9000, dtype=dtype)
    slack = 8 * torch.finfo(torch.float32 if dtype.itemsize == 2 else dtype).eps
    assert ((result.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps / 2 + slack).all()
    assert_same_bits(result)


@ranks(2, 4)
def test_orthogonal_vectors_are_added(hvd: ModuleType) -> None:
    mine = torch.zeros(hvd.size())
    mine[hvd.rank()] = hvd.rank() + 1.0
    result = hvd.allreduce(mine, op=hvd.Adasum)
    assert result.tolist() == [rank + 1.0 for rank in range(hvd.size())]


@ranks(2, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parallel_vectors_of_very_different_length_are_averaged(hvd: ModuleType, dtype: torch.dtype) -> None:
    lengths = [1e-30, 1e18, 1.0, 1e-3][: hvd.size()]
    direction = draw(0, 1000, dtype=dtype)
    result = hvd.allreduce(direction * lengths[hvd.rank()], op=hvd.Adasum)
    torch.testing.assert_close(result, direction * (sum(lengths) / hvd.size()))


@ranks(2, 4)
def test_zeros_leave_the_others_as_they_are(hvd: ModuleType) -> None:
    mine = torch.tensor([1.0, -2.0]) if hvd.rank() == 1 else torch.zeros(2)
    assert hvd.allreduce(mine, op=hvd.Adasum).tolist() == [1.0, -2.0]


@ranks(2)
def test_groups_places_and_scale_factors_work_as_for_a_sum(hvd: ModuleType) -> None:
    a, b = draw(hvd.rank(), 30, 20, seed=1), draw(hvd.rank(), 5, seed=2)
    exact_a, exact_b = everyones(hvd, 30, 20, seed=1).float(), everyones(hvd, 5, seed=2).float()
    strided = a.t().contiguous().t()
    results = hvd.grouped_allreduce([strided, b], op=hvd.Adasum, prescale_factor=2.0, postscale_factor=0.25)
    torch.testing.assert_close(results, [exact_a / 2, exact_b / 2])
    assert hvd.allreduce_(strided, op=hvd.Adasum) is strided
    torch.testing.assert_close(strided, exact_a)


@ranks(2)
def test_what_is_not_a_number_stays_visible(hvd: ModuleType) -> None:
    mine = torch.tensor([1.0, float("nan") if hvd.rank() else 2.0])
    assert hvd.allreduce(mine, op=hvd.Adasum).isnan().all()


@ranks(2)
def test_gradients_are_combined_the_same_way(hvd: ModuleType) -> None:
    mine = draw(hvd.rank(), 6, seed=3).requires_grad_()
    (hvd.allreduce(mine, op=hvd.Adasum) * draw(hvd.rank(), 6, seed=4)).sum().backward()
    torch.testing.assert_close(mine.grad, everyones(hvd, 6, seed=4).float())


@ranks(2)
def test_only_floats_have_directions(hvd: ModuleType) -> None:
    with pytest.raises(ValueError, match="'counts' is of dtype int64, which Adasum is not defined for"):
        hvd.allreduce(torch.ones(2, dtype=torch.int64), name="counts", op=hvd.Adasum)
    with pytest.raises(NotImplementedError, match="reducescatter"):
        hvd.reducescatter(torch.ones(2), op=hvd.Adasum)


@ranks(3)
def test_it_needs_a_power_of_two_of_ranks(hvd: ModuleType) -> None:
    with pytest.raises(NotImplementedError, match=r"'g': Adasum combines ranks in pairs.* there are 3"):
        hvd.allreduce(torch.ones(2), name="g", op=hvd.Adasum)
    with pytest.raises(NotImplementedError, match="there are 3"):
        hvd.DistributedOptimizer(torch.optim.SGD([torch.ones(2, requires_grad=True)]), op=hvd.Adasum)


def locally_trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer, data: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(data).square().mean().backward()
    optimizer.step()


@ranks(1, 2, 4)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_the_optimizer_combines_what_each_rank_would_have_changed(
    hvd: ModuleType, kind: type[torch.optim.Optimizer]
) -> None:
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    copies = [copy.deepcopy(model) for _ in range(hvd.size())]
    alone = [kind(each.parameters(), lr=0.1) for each in copies]
    wrapped = hvd.DistributedOptimizer(
        kind(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), op=hvd.Adasum
    )
    for step in range(3):
        starts = [parameter.detach().clone() for parameter in model.parameters()]
        for rank, (each, optimizer) in enumerate(zip(copies, alone, strict=True)):
            each.load_state_dict(model.state_dict())
            locally_trained(each, optimizer, draw(rank, 8, 4, seed=step))
        locally_trained(model, wrapped, draw(hvd.rank(), 8, 4, seed=step))
        for n, (parameter, start) in enumerate(zip(model.parameters(), starts, strict=True)):
            changes = [list(each.parameters())[n].detach() - start for each in copies]
            torch.testing.assert_close(parameter.detach(), (start + expected(changes)).float())
        assert_same_bits(*(parameter.detach() for parameter in model.parameters()))


@ranks(2)
def test_a_parameter_that_one_rank_did_not_use_is_changed_by_the_other(hvd: ModuleType) -> None:
    a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([a, b], lr=1.0), [("a", a), ("b", b)], op=hvd.Adasum)
    (a.sum() if hvd.rank() == 0 else b.sum() * 2).backward()
    optimizer.step()
    assert a.tolist() == [0.0, 0.0]
    assert b.tolist() == [-1.0, -1.0]


@ranks(2)
def test_the_optimizer_takes_closures_and_compression_and_keeps_its_class(hvd: ModuleType) -> None:
    w = torch.ones(4, requires_grad=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([w], lr=0.5), [("w", w)], op=hvd.Adasum, compression=hvd.Compression.fp16
    )
    assert isinstance(optimizer, torch.optim.SGD)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = w.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4.0
    scheduler.step()
    assert w.tolist() == [0.75] * 4
    optimizer.synchronize()
    with pytest.raises(NotImplementedError, match="skip_synchronize"), optimizer.skip_synchronize():
        pass
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(optimizer, op=hvd.Adasum)
