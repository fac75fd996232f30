"""Operations that move or share out rows, and those without tensors."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import ranks


@ranks(1, 2, 3)
def test_broadcast_gives_the_values_of_the_root(hvd):
    for root in range(hvd.size()):
        mine = torch.full((2, 3), float(hvd.rank()))
        result = hvd.broadcast(mine, root)
        assert result.tolist() == [[root] * 3] * 2
        assert (mine == hvd.rank()).all() and result.data_ptr() != mine.data_ptr()
        assert hvd.broadcast_(mine, root) is mine and (mine == root).all()


@ranks(1, 2, 3)
def test_allgather_concatenates_rows_of_any_number(hvd):
    mine = torch.full((hvd.rank(), 2), hvd.rank())
    gathered = hvd.allgather(mine)
    assert gathered.tolist() == [[rank, rank] for rank in range(hvd.size()) for _ in range(rank)]
    first, second = hvd.grouped_allgather([mine, torch.tensor([float(hvd.rank())])])
    assert torch.equal(first, gathered) and second.tolist() == list(range(hvd.size()))
    with pytest.raises(ValueError, match="reshape"):
        hvd.allgather(torch.tensor(1.0))


@ranks(2)
def test_every_operation_takes_tensors_of_any_strides(hvd):
    turned = (torch.arange(12.0).view(3, 4) + 100 * hvd.rank()).t()[::2]
    packed = turned.contiguous()
    assert not turned.is_contiguous()
    splits = [hvd.rank(), 2 - hvd.rank()]
    for call in (
        lambda x: hvd.allreduce(x, op=hvd.Sum),
        lambda x: hvd.grouped_allreduce([x, x.int()], op=hvd.Max)[1],
        hvd.allgather,
        lambda x: hvd.grouped_allgather([x])[0],
        lambda x: hvd.broadcast(x, 1),
        lambda x: hvd.alltoall(x, splits=splits)[0],
        lambda x: hvd.reducescatter(x, op=hvd.Sum),
        lambda x: hvd.grouped_reducescatter([x])[0],
        lambda x: hvd.allreduce(x, op=hvd.Adasum),
        lambda x: hvd.allreduce(x, compression=hvd.Compression.bf16),
    ):
        assert torch.equal(call(turned), call(packed))
    assert torch.equal(turned, packed)
    for call in (lambda x: hvd.allreduce_(x, op=hvd.Sum), lambda x: hvd.broadcast_(x, 0)):
        base = torch.arange(12.0).view(3, 4) + hvd.rank()
        expected = call(base.t()[::2].contiguous())
        call(base.t()[::2])
        assert torch.equal(base.t()[::2], expected)
        assert torch.equal(base.t()[1::2], (torch.arange(12.0).view(3, 4) + hvd.rank()).t()[1::2])


@ranks(2)
def test_a_single_element_with_odd_strides_is_gathered(hvd):
    assert hvd.allgather(torch.arange(4)[1:2].as_strided((1,), (3,))).tolist() == [1, 1]


@ranks(2, 3)
def test_alltoall_sends_rows_by_splits(hvd):
    n, r = hvd.size(), hvd.rank()
    splits = torch.tensor([rank + 1 for rank in range(n)], dtype=torch.int32)
    rows, received = hvd.alltoall(torch.full((int(splits.sum()),), r), splits=splits)
    assert rows.tolist() == [source for source in range(n) for _ in range(r + 1)]
    assert received.dtype == torch.int32 and received.tolist() == [r + 1] * n
    assert hvd.alltoall(torch.arange(n)).tolist() == [r] * n
    rows, received = hvd.synchronize(hvd.alltoall_async(torch.arange(n)))
    assert received.tolist() == [1] * n


@ranks(2)
def test_bad_splits_are_refused(hvd):
    with pytest.raises(ValueError, match="'a' has 3 rows"):
        hvd.alltoall(torch.ones(3), name="a")
    for splits in ([1, 3], [-1, 2], [1], torch.ones(2)):
        with pytest.raises(ValueError, match="'a': splits"):
            hvd.alltoall(torch.ones(3), splits=splits, name="a")


@ranks(1, 2, 3)
def test_reducescatter_gives_the_first_ranks_one_row_more(hvd):
    n, r = hvd.size(), hvd.rank()
    rows = [2 if rank == 0 else 1 for rank in range(n)]
    mine = torch.arange(float(n + 1)).view(n + 1, 1)
    expected = (mine * n)[sum(rows[:r]) : sum(rows[: r + 1])]
    assert torch.equal(hvd.reducescatter(mine, op=hvd.Sum), expected)
    results = hvd.grouped_reducescatter([mine, mine.int()], op=hvd.Sum)
    assert [result.tolist() for result in results] == [expected.tolist()] * 2
    with pytest.raises(ValueError, match="scalar"):
        hvd.reducescatter(torch.tensor(1.0))
    with pytest.raises(NotImplementedError, match="Adasum"):
        hvd.reducescatter(mine, op=hvd.Adasum)


@ranks(2, 3)
def test_sparse_tensors_are_merged_and_reduced(hvd):
    n, r = hvd.size(), hvd.rank()
    mine = torch.sparse_coo_tensor([[1, 1, r]], [1.0, 2.0, 4.0], (4,), check_invariants=True)
    if r == n - 1:
        mine = torch.sparse_coo_tensor(torch.empty(1, 0), torch.empty(0), (4,), check_invariants=True)
    dense = hvd.allreduce(mine.to_dense(), op=hvd.Sum)
    handle = hvd.sparse_allreduce_async(mine, name="sparse", op=hvd.Sum)
    assert torch.equal(hvd.synchronize(handle).to_dense(), dense)
    average = hvd.sparse_allreduce_async(mine, name="sparse", op=hvd.Average)()
    assert torch.allclose(average.to_dense(), dense / n) and average.is_coalesced()
    with pytest.raises(ValueError, match="only op=Average and op=Sum"):
        hvd.sparse_allreduce_async(mine, op=hvd.Max)
    with pytest.raises(TypeError, match="allreduce_async"):
        hvd.sparse_allreduce_async(torch.ones(2))


@ranks(1, 2)
def test_barrier_returns(hvd):
    hvd.barrier()
    hvd.barrier(process_set=hvd.global_process_set)


@ranks(2)
def test_the_global_process_set_is_all_ranks(hvd):
    everyone = hvd.global_process_set
    assert (everyone.size(), everyone.rank(), everyone.ranks) == (2, hvd.rank(), [0, 1])
    assert everyone.included() and everyone.process_set_id == 0
