"""Broadcast, all-gather, all-to-all, reduce-scatter and barrier on the data plane alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from mpi4py import MPI

import fusion.channel
import fusion.shm
from coordinator.errors import FusionError
from coordinator.handle import Bell, Handle
from coordinator.messages import ANY, OpKind, ReduceOp, Request
from fusion.arithmetic import Arithmetic, Scratch
from fusion.dtypes import name_of
from fusion.topology import TEST_NODES, Topology
from tests.mpi.plane import EVERYWHERE, Plane, Settings, assert_same_bits, draw, entry
from tests.ranks import ranks

INIT = None
DTYPES = (torch.bool, torch.int8, torch.bfloat16, torch.float64)


@pytest.fixture(scope="module", params=EVERYWHERE)
def plane(request: pytest.FixtureRequest) -> Iterator[Plane]:
    made = Plane(request.param)
    yield made
    made.close()


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("count", [0, 1, 30_001])
def test_broadcast_gives_every_rank_the_values_of_any_root(plane: Plane, count: int) -> None:
    for root in range(plane.size):
        mine = draw(plane.rank, count)
        (result,) = plane.one(OpKind.BROADCAST, mine, torch.empty_like(mine), root_rank=root)
        assert torch.equal(result, draw(root, count))
        assert torch.equal(mine, draw(plane.rank, count))


@ranks(2, 3)
@pytest.mark.parametrize("dtype", DTYPES)
def test_broadcast_in_place_respects_strides_and_dtype(plane: Plane, dtype: torch.dtype) -> None:
    base = draw(plane.rank, 60, 100, dtype=dtype)
    column = base.t()[5:90]
    plane.one(OpKind.BROADCAST, column, column, root_rank=plane.size - 1)
    expected = draw(plane.rank, 60, 100, dtype=dtype)
    expected[:, 5:90] = draw(plane.size - 1, 60, 100, dtype=dtype)[:, 5:90]
    assert torch.equal(base, expected)


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", DTYPES)
def test_allgather_puts_rows_of_different_numbers_in_rank_order(plane: Plane, dtype: torch.dtype) -> None:
    rows = [0 if rank == 1 else 1 + 700 * rank for rank in range(plane.size)]
    (result,) = plane.one(OpKind.ALLGATHER, draw(plane.rank, rows[plane.rank], 3, dtype=dtype))
    assert torch.equal(
        result, torch.cat([draw(rank, rows[rank], 3, dtype=dtype) for rank in range(plane.size)])
    )


@ranks(2, 3)
def test_allgather_of_no_rows_at_all_is_empty(plane: Plane) -> None:
    (result,) = plane.one(OpKind.ALLGATHER, torch.empty(0, 4))
    assert result.shape == (0, 4)


@ranks(1, 2, 3, 4)
def test_alltoall_delivers_each_ranks_rows_and_says_how_many(plane: Plane) -> None:
    def splits(sender: int) -> list[int]:
        return [(3 * sender + 5 * receiver) % 4 * 400 for receiver in range(plane.size)]

    def rows(sender: int) -> tuple[torch.Tensor, ...]:
        return draw(sender, sum(splits(sender)), 2).split(splits(sender))

    result, received = plane.one(
        OpKind.ALLTOALL, draw(plane.rank, sum(splits(plane.rank)), 2), extra=splits(plane.rank)
    )
    assert received.tolist() == [splits(sender)[plane.rank] for sender in range(plane.size)]
    assert torch.equal(result, torch.cat([rows(sender)[plane.rank] for sender in range(plane.size)]))


@ranks(1, 2, 3)
def test_alltoall_without_splits_shares_equally(plane: Plane) -> None:
    mine = torch.full((plane.size,), plane.rank)
    assert plane.one(OpKind.ALLTOALL, mine)[0].tolist() == list(range(plane.size))


@ranks(2, 3)
def test_bad_splits_on_one_rank_fail_on_all_and_the_next_operation_works(plane: Plane) -> None:
    good = [1] * plane.size
    with pytest.raises(ValueError, match="ranks 1 do not fit"):
        plane.one(OpKind.ALLTOALL, torch.zeros(plane.size), extra=[5] if plane.rank == 1 else good)
    assert len(plane.one(OpKind.ALLTOALL, torch.zeros(plane.size), extra=good)[0]) == plane.size


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("rows", [0, 1, 4, 7, 2003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32])
def test_reducescatter_gives_each_rank_its_rows_of_the_average(
    plane: Plane, rows: int, dtype: torch.dtype
) -> None:
    (result,) = plane.one(OpKind.REDUCESCATTER, draw(plane.rank, rows, 3, dtype=dtype), op=ReduceOp.AVERAGE)
    inputs = torch.stack([draw(rank, rows, 3, dtype=dtype) for rank in range(plane.size)])
    mean = (
        inputs.double().mean(0)
        if dtype.is_floating_point
        else inputs.sum(0).div(plane.size, rounding_mode="trunc")
    )
    torch.testing.assert_close(result, mean.to(dtype).tensor_split(plane.size)[plane.rank])


@ranks(2)
def test_a_given_output_is_filled(plane: Plane) -> None:
    output = torch.zeros(2 * plane.size)[::2]
    plane.one(OpKind.ALLGATHER, torch.ones(1), output)
    assert output.tolist() == [1.0] * plane.size


@ranks(1, 2, 3, 4)
def test_barrier_returns_on_all(plane: Plane) -> None:
    request = Request("barrier", OpKind.BARRIER, ("uint8",), ((0,),))
    made = entry(request, None, None)
    made.inputs = ()
    for _ in range(3):
        plane.execute([made])


@ranks(2, 3)
def test_messages_longer_than_mpi_counts_are_cut(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion.channel, "MAX_MESSAGE_BYTES", 1000)
    gathered = plane.one(OpKind.ALLGATHER, draw(plane.rank, 2501))[0]
    assert torch.equal(gathered, torch.cat([draw(rank, 2501) for rank in range(plane.size)]))
    exchanged = plane.one(OpKind.ALLTOALL, draw(plane.rank, 2500 * plane.size))[0]
    parts = [draw(rank, 2500 * plane.size).split(2500)[plane.rank] for rank in range(plane.size)]
    assert torch.equal(exchanged, torch.cat(parts))


@ranks(2, 3, 4)
def test_collectives_of_all_kinds_may_follow_each_other(plane: Plane) -> None:
    for step in range(6):
        mine = draw(plane.rank, 3000, seed=step)
        inputs = [draw(rank, 3000, seed=step) for rank in range(plane.size)]
        root = step % plane.size
        broadcast = plane.one(OpKind.BROADCAST, mine, torch.empty_like(mine), root_rank=root)[0]
        total = plane.allreduce([mine])[0]
        gathered = plane.one(OpKind.ALLGATHER, mine)[0]
        part = plane.one(OpKind.REDUCESCATTER, mine)[0]
        assert torch.equal(broadcast, inputs[root])
        assert torch.equal(gathered, torch.cat(inputs))
        torch.testing.assert_close(total, torch.stack(inputs).sum(0))
        torch.testing.assert_close(part, total.tensor_split(plane.size)[plane.rank])
        assert_same_bits(total, gathered)


@ranks(4)
def test_nodes_are_described_alike_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TEST_NODES, "1,3")
    topology = Topology.create(MPI.COMM_WORLD)
    assert topology.nodes == ((0,), (1, 2, 3)) and topology.slices == 1
    place = (topology.local_rank, topology.local_size, topology.cross_rank, topology.cross_size)
    assert place == [(0, 1, 0, 2), (0, 3, 1, 2), (1, 3, 0, 1), (2, 3, 0, 1)][topology.rank]
    topology.close()


@ranks(2)
def test_a_description_of_nodes_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TEST_NODES, "2,2")
    with pytest.raises(ValueError, match="describes 4 ranks but the job has 2"):
        Topology.create(MPI.COMM_WORLD)


@ranks(2)
def test_no_file_is_left_for_the_memory_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = MPI.COMM_WORLD.bcast(tmp_path)
    monkeypatch.setattr(fusion.shm, "DIRECTORY", str(folder))
    made = Plane("one node", Settings(chunk_kb=64))
    assert list(folder.iterdir()) == []
    assert made.allreduce([torch.ones(3)])[0].tolist() == [2.0] * 3
    made.close()


@ranks(2)
def test_no_file_is_left_where_memory_could_not_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = MPI.COMM_WORLD.bcast(tmp_path)
    monkeypatch.setattr(fusion.shm, "DIRECTORY", str(folder))
    with pytest.raises(FusionError, match="shared memory"):
        Plane("one node", Settings(chunk_kb=1 << 40))
    assert list(folder.iterdir()) == []


@ranks(2, 3)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.uint8, torch.bfloat16, torch.float32])
def test_a_rank_that_has_joined_changes_no_reduction(plane: Plane, op: ReduceOp, dtype: torch.dtype) -> None:
    mine = draw(plane.rank, 500, dtype=dtype)
    request = Request("t", OpKind.ALLREDUCE, (name_of(dtype),), ((500,),), op=op)
    made = entry(request, mine, torch.empty_like(mine))
    if plane.rank == 1:
        made = plane.executor.absent(plane.request(request), Handle("t", Bell()))
    plane.execute([made])
    others = [draw(rank, 500, dtype=dtype) for rank in range(plane.size) if rank != 1]
    expected = torch.empty_like(mine)
    Arithmetic(op, name_of(dtype), plane.size, prescale=1.0, postscale=1.0, scratch=Scratch()).reduce(
        others, expected
    )
    torch.testing.assert_close(made.outputs[0], expected)


@ranks(2, 3)
def test_a_rank_that_has_joined_adds_no_rows(plane: Plane) -> None:
    request = Request("t", OpKind.ALLGATHER, ("float32",), ((ANY, 2),))
    made = entry(request, draw(plane.rank, 5, 2), None)
    if plane.rank == 1:
        made = plane.executor.absent(plane.request(request), Handle("t", Bell()))
    plane.execute([made])
    assert torch.equal(
        made.outputs[0], torch.cat([draw(rank, 5, 2) for rank in range(plane.size) if rank != 1])
    )
