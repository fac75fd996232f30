"""The collective operations as a program calls them: what all have in common, and gradients."""

from __future__ import annotations

import gc
import random
import weakref

import numpy as np
import pytest
import torch

from tests.ranks import ranks

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


@ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
def test_allreduce_combines_by_op_and_keeps_the_dtype(hvd, dtype):
    mine = torch.tensor([hvd.rank() + 1, 2], dtype=dtype)
    n = hvd.size()
    ranks_summed = n * (n + 1) // 2
    expected = {
        hvd.Sum: [ranks_summed, 2 * n],
        hvd.Min: [1, 2],
        hvd.Max: [n, 2],
        hvd.Product: [[1, 2, 6][n - 1], 2**n],
        hvd.Average: [(n + 1) / 2 if dtype.is_floating_point else ranks_summed // n, 2],
    }
    for op, values in expected.items():
        result = hvd.allreduce(mine, op=op)
        assert result.dtype == dtype
        assert result.tolist() == values


@ranks(2)
def test_the_default_is_the_average(hvd):
    assert hvd.allreduce(torch.tensor([float(hvd.rank())])).item() == 0.5


@ranks(2)
def test_average_is_deprecated_and_works(hvd):
    with pytest.warns(DeprecationWarning, match="op="):
        assert hvd.allreduce(torch.ones(1), average=False).item() == 2
    with pytest.raises(ValueError, match="not both"):
        hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum)


@ranks(2)
def test_values_are_scaled_before_and_after(hvd):
    mine = torch.tensor([1.0 + hvd.rank()])
    assert hvd.allreduce(mine, op=hvd.Sum, prescale_factor=2.0, postscale_factor=5.0).item() == 30
    assert hvd.allreduce(mine, op=hvd.Max, prescale_factor=-1.0).item() == -1


@ranks(2)
def test_the_out_of_place_form_leaves_its_input_and_shares_no_memory(hvd):
    mine = torch.full((4,), float(hvd.rank()))
    result = hvd.allreduce(mine, op=hvd.Sum)
    result += 1
    assert mine.tolist() == [hvd.rank()] * 4
    assert hvd.allreduce(mine, op=hvd.Sum).tolist() == [1] * 4


@ranks(2)
def test_the_in_place_form_returns_the_tensor_itself(hvd):
    mine = torch.ones(4)
    assert hvd.allreduce_(mine, op=hvd.Sum) is mine
    assert mine.tolist() == [2] * 4
    assert hvd.synchronize(hvd.allreduce_async_(mine, op=hvd.Sum)) is mine
    assert mine.tolist() == [4] * 4


@ranks(2)
def test_a_handle_is_a_future(hvd):
    handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum)
    assert handle.result(timeout=30).tolist() == [2, 2]
    assert handle.done() and handle.exception() is None and hvd.poll(handle)
    assert hvd.synchronize(handle).tolist() == [2, 2]


@ranks(2)
def test_what_is_no_handle_is_refused(hvd):
    with pytest.raises(TypeError, match="Tensor"):
        hvd.synchronize(torch.ones(1))


@ranks(2, 3)
def test_ranks_may_submit_and_wait_in_any_order(hvd):
    names = [f"t{i}" for i in range(50)]
    random.Random(hvd.rank()).shuffle(names)
    handles = {k: hvd.allreduce_async(torch.full((3,), float(k[1:])), name=k, op=hvd.Sum) for k in names}
    random.Random(hvd.rank() + 10).shuffle(names)
    for name in names:
        assert handles[name].result().tolist() == [hvd.size() * float(name[1:])] * 3


@ranks(2)
def test_a_name_in_flight_is_refused_and_free_again_afterwards(hvd):
    if hvd.rank() == 0:
        first = hvd.allreduce_async(torch.ones(2), name="w", op=hvd.Sum)
        with pytest.raises(ValueError, match="'w'"):
            hvd.allreduce_async(torch.ones(2), name="w", op=hvd.Sum)
        hvd.barrier()
    else:
        hvd.barrier()
        first = hvd.allreduce_async(torch.ones(2), name="w", op=hvd.Sum)
    assert first.result().tolist() == [2, 2]
    assert hvd.allreduce(torch.ones(2), name="w", op=hvd.Sum).tolist() == [2, 2]


@ranks(2)
def test_the_caller_may_drop_a_tensor_in_flight(hvd):
    handles = [
        hvd.allreduce_async(torch.full((1000,), float(i)), name=str(i), op=hvd.Sum) for i in range(100)
    ]
    gc.collect()
    noise = [torch.rand(1000) for _ in range(100)]
    for i, handle in enumerate(handles):
        assert (handle.result() == 2.0 * i).all()
    assert len(noise) == 100


@ranks(2)
def test_nothing_keeps_a_tensor_after_its_handle_is_gone(hvd):
    mine = torch.ones(10)
    gone = weakref.ref(mine)
    hvd.allreduce_(mine)
    del mine
    hvd.barrier()
    gc.collect()
    assert gone() is None


@ranks(2, 3)
def test_grouped_forms_return_lists_in_order(hvd):
    n = hvd.size()
    tensors = [torch.ones(3), torch.full((2, 2), 2, dtype=torch.int64), torch.ones(0), torch.tensor(4.0)]
    results = hvd.grouped_allreduce(tensors, op=hvd.Sum)
    assert [result.tolist() for result in results] == [[n] * 3, [[2 * n] * 2] * 2, [], 4 * n]
    assert tensors[3].item() == 4
    handle = hvd.grouped_allreduce_async(tensors, op=hvd.Sum, name="group")
    assert [r.tolist() for r in hvd.synchronize(handle)] == [r.tolist() for r in results]
    in_place = hvd.grouped_allreduce_(tensors, op=hvd.Sum)
    assert all(result is tensor for result, tensor in zip(in_place, tensors, strict=True))
    assert tensors[3].item() == 4 * n
    hvd.synchronize(hvd.grouped_allreduce_async_(tensors, op=hvd.Sum))
    assert tensors[3].item() == 4 * n * n


@ranks(2)
def test_a_group_of_nothing_is_refused(hvd):
    with pytest.raises(ValueError, match="at least one"):
        hvd.grouped_allreduce([])


@ranks(2)
def test_strided_views_are_right_and_leave_their_neighbours_alone(hvd):
    base = torch.arange(6.0).view(2, 3)
    view = base[:, 1]
    hvd.allreduce_(view, op=hvd.Sum, name="v")
    assert base.tolist() == [[0, 2, 2], [3, 8, 5]]
    assert hvd.allreduce(base.T, op=hvd.Sum).tolist() == (2 * base.T).tolist()
    assert hvd.allreduce(torch.tensor(3.0).expand(2, 2), op=hvd.Sum).tolist() == [[6, 6], [6, 6]]


@ranks(2)
def test_in_place_on_overlapping_memory_is_refused(hvd):
    with pytest.raises(ValueError, match=r"'e'.*share memory"):
        hvd.allreduce_(torch.ones(1).expand(4), name="e")
    assert hvd.allreduce(torch.ones(1), name="e", op=hvd.Sum).item() == 2


@ranks(2)
def test_channels_last_goes_in_and_comes_out(hvd):
    image = torch.arange(48.0).view(1, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    result = hvd.allreduce(image, op=hvd.Sum)
    assert torch.equal(result, 2 * image)
    assert result.is_contiguous(memory_format=torch.channels_last)


@ranks(2, 3)
def test_empty_tensors_take_part_between_others(hvd):
    handles = [
        hvd.allreduce_async(torch.ones(size), name=f"z{size}.{i}", op=hvd.Sum)
        for i, size in enumerate([3, 0, 2])
    ]
    assert [handle.result().tolist() for handle in handles] == [[hvd.size()] * 3, [], [hvd.size()] * 2]
    assert hvd.allreduce(torch.empty(0, 3)).shape == (0, 3)


@ranks(2)
def test_half_precision_averages_do_not_overflow(hvd):
    big = torch.full((4,), 40000.0, dtype=torch.float16)
    assert hvd.allreduce(big, op=hvd.Average).tolist() == [40000.0] * 4
    narrow = hvd.allreduce(torch.tensor([300.0, 1.0]), compression=hvd.Compression.bf16, op=hvd.Sum)
    assert narrow.dtype == torch.float32 and narrow.tolist() == [600, 2]


@ranks(2)
def test_bool_has_any_and_all_but_no_average(hvd):
    mine = torch.tensor([True, hvd.rank() == 0, False])
    assert hvd.allreduce(mine, op=hvd.Sum).tolist() == [True, True, False]
    assert hvd.allreduce(mine, op=hvd.Min).tolist() == [True, False, False]
    with pytest.raises(ValueError, match=r"'b'.*no average"):
        hvd.allreduce(mine, op=hvd.Average, name="b")


@ranks(2)
def test_dtypes_that_cannot_travel_are_refused_by_name(hvd):
    with pytest.raises(TypeError, match=r"'c'.*view_as_real"):
        hvd.allreduce(torch.tensor([1 + 2j]), name="c")
    with pytest.raises(TypeError, match=r"'q'.*uint32"):
        hvd.allreduce(torch.zeros(2, dtype=torch.uint32), name="q")
    with pytest.raises(TypeError, match=r"'s'.*sparse_allreduce_async"):
        hvd.allreduce(torch.eye(2).to_sparse(), name="s")
    with pytest.raises(TypeError, match=r"'m'.*meta"):
        hvd.allreduce(torch.ones(2, device="meta"), name="m")
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2


@ranks(2)
def test_arguments_that_make_no_sense_are_refused(hvd):
    one = torch.ones(1)
    with pytest.raises(TypeError, match="op must be"):
        hvd.allreduce(one, op="sum")
    with pytest.raises(TypeError, match="name must be"):
        hvd.allreduce(one, name=3)
    with pytest.raises(ValueError, match="root_rank is 2"):
        hvd.broadcast(one, root_rank=2)
    with pytest.raises(TypeError, match="root_rank"):
        hvd.broadcast(one, root_rank="0")
    with pytest.raises(TypeError, match="process_set"):
        hvd.allreduce(one, process_set=[0, 1])


@ranks(2)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.ones(4), torch.ones(5)),
        (torch.ones(2, 3), torch.ones(3, 2)),
        (torch.ones(4), torch.ones(4, dtype=torch.int32)),
    ],
    ids=["length", "shape", "dtype"],
)
def test_tensors_that_differ_fail_on_every_rank_and_later_ones_work(hvd, first, second):
    with pytest.raises(hvd.MismatchError, match="'s'"):
        hvd.allreduce(first if hvd.rank() == 0 else second, name="s")
    assert hvd.allreduce(torch.ones(2), name="s", op=hvd.Sum).tolist() == [2, 2]


@ranks(2)
def test_other_differences_fail_too(hvd):
    one, first = torch.ones(1), hvd.rank() == 0
    with pytest.raises(hvd.MismatchError, match="'m'"):
        hvd.allreduce(one, name="m", op=hvd.Sum if first else hvd.Max)
    with pytest.raises(hvd.MismatchError, match="'m'"):
        hvd.allreduce(one, name="m", prescale_factor=1.0 if first else 2.0)
    with pytest.raises(hvd.MismatchError, match="'m'"):
        hvd.broadcast(one, hvd.rank(), name="m")
    with pytest.raises(hvd.MismatchError, match="'m'"):
        (hvd.allreduce if first else hvd.allgather)(one, name="m")


@ranks(2)
def test_numpy_in_numpy_out(hvd):
    mine = np.full(3, hvd.rank() + 1, dtype=np.int32)
    result = hvd.allreduce(mine, op=hvd.Sum)
    assert isinstance(result, np.ndarray) and result.dtype == np.int32 and result.tolist() == [3] * 3
    assert hvd.allreduce_(mine, op=hvd.Sum) is mine and mine.tolist() == [3] * 3
    rows, received = hvd.alltoall(np.arange(2.0), splits=[1, 1])
    assert isinstance(rows, np.ndarray) and isinstance(received, np.ndarray)
    assert isinstance(hvd.allreduce(mine, compression=hvd.Compression.fp16), np.ndarray)
    first, second = hvd.grouped_allreduce([mine, torch.ones(1)], op=hvd.Sum)
    assert isinstance(first, np.ndarray) and isinstance(second, torch.Tensor)
    assert hvd.allreduce(np.float32(2.0), op=hvd.Sum).item() == 4


@ranks(2)
def test_ops_do_not_disturb_an_autograd_graph(hvd):
    leaf = torch.ones(3, requires_grad=True)
    hvd.broadcast_(leaf, 0)
    assert leaf.is_leaf and leaf.requires_grad and leaf.grad is None
    assert not hvd.allreduce_async(leaf, op=hvd.Sum).result().requires_grad
    with torch.no_grad():
        assert not hvd.allreduce(leaf).requires_grad


@ranks(2)
def test_writing_in_place_is_seen_by_autograd(hvd):
    value = torch.ones(3)
    weight = torch.ones(3, requires_grad=True)
    product = value * weight
    hvd.allreduce_(value, op=hvd.Sum)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def gradient(call, *inputs):
    result = call(*inputs)
    (result * torch.arange(1.0, result.numel() + 1).view_as(result)).sum().backward()
    return inputs[0].grad


@ranks(2, 3)
def test_gradients_of_allreduce(hvd):
    n, r = hvd.size(), hvd.rank()
    weights = torch.arange(1.0, 4.0)

    def of(op, value, **options):
        x = torch.full((3,), float(value), requires_grad=True)
        return gradient(lambda x: hvd.allreduce(x, op=op, **options), x)

    assert torch.equal(of(hvd.Sum, 1), n * weights)
    assert torch.allclose(of(hvd.Average, 1), weights)
    assert torch.equal(of(hvd.Sum, 1, prescale_factor=2.0, postscale_factor=3.0), 6 * n * weights)
    assert torch.equal(of(hvd.Max, r), n * weights * (r == n - 1))
    assert torch.equal(of(hvd.Min, r), n * weights * (r == 0))
    assert torch.allclose(of(hvd.Max, 5), weights)  # All ranks hold the maximum, and share it.
    assert torch.equal(of(hvd.Product, 2), n * weights * 2 ** (n - 1))
    zero_here = n * weights * (2 ** (n - 1) if r == 0 else 0)
    assert torch.equal(of(hvd.Product, 0 if r == 0 else 2), zero_here)


@ranks(2, 3)
def test_gradients_of_the_other_operations(hvd):
    n, r = hvd.size(), hvd.rank()
    x = torch.ones(r + 1, requires_grad=True)
    start = r * (r + 1) // 2
    assert torch.allclose(gradient(hvd.allgather, x), torch.arange(1.0, r + 2) + start)
    x = torch.ones(2, requires_grad=True)
    assert torch.allclose(gradient(lambda x: hvd.broadcast(x, 1), x), torch.tensor([1.0, 2.0]) * (r == 1))
    x = torch.ones(n, requires_grad=True)
    assert torch.equal(gradient(hvd.alltoall, x), torch.full((n,), r + 1.0))
    x = torch.ones(n + 1, requires_grad=True)
    rows, _ = hvd.alltoall(x, splits=[1] * n)
    rows.sum().backward()
    assert x.grad.tolist() == [1] * n + [0]
    x = torch.ones(n, requires_grad=True)
    assert torch.equal(gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum), x), torch.full((n,), float(n)))
    x = torch.ones(n, requires_grad=True)
    assert torch.equal(gradient(lambda x: hvd.reducescatter(x, op=hvd.Average), x), torch.ones(n))


@ranks(2)
def test_gradients_of_groups_and_through_compression(hvd):
    x, y = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    a, b = hvd.grouped_allreduce([x, y], op=hvd.Sum, compression=hvd.Compression.fp16)
    (a.sum() + 3 * b.sum()).backward()
    assert x.grad.tolist() == [2, 2] and y.grad.tolist() == [6] * 3
    x = torch.ones(2, requires_grad=True)
    first, second = hvd.grouped_allgather([x, 2 * x])
    (first.sum() + second.sum()).backward()
    assert x.grad.tolist() == [3, 3]
