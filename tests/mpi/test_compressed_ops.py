"""All-reduce with a compressor: operations, errors, and what ranks must agree about."""

from __future__ import annotations

import pytest
import torch

import fusion.compression as fc
from coordinator.messages import ReduceOp
from tests.mpi.plane import Plane, assert_same_bits, draw
from tests.ranks import ranks

METHODS = ["fp16", "bf16", "int8", "onebit", "terngrad", "topk:0.1", "randomk:0.1", "powersgd:2"]


def mean_of_sent(spec: str, size: int, *shape: int) -> torch.Tensor:
    """For methods that use no random numbers: the mean of what each rank sends."""
    info, compressor = fc.BucketInfo.of([("t", shape)]), fc.parse(spec)
    sent = [
        compressor.decode(compressor.encode(draw(rank, *shape).flatten(), info, fc.Key(0)), info)
        for rank in range(size)
    ]
    return (sum(sent) / size).view(shape)


@ranks(1, 2, 4)
def test_every_method_gives_an_approximation_that_is_the_same_on_all_ranks(hvd):
    exact = hvd.allreduce(draw(hvd.rank(), 40, 50))
    for spec in METHODS:
        for op, factor in ((hvd.Average, 1), (hvd.Sum, hvd.size())):
            result = hvd.allreduce(draw(hvd.rank(), 40, 50), op=op, compression=spec)
            assert_same_bits(result)
            assert result.isfinite().all()
            if spec in ("fp16", "bf16", "int8"):
                assert torch.allclose(result, exact * factor, atol=0.05 * factor)


@ranks(2, 4)
@pytest.mark.parametrize("arrangement", ["one node", "pairs", "ring of all"])
def test_what_arrives_is_the_mean_of_what_was_sent_on_every_arrangement_of_nodes(arrangement):
    plane = Plane(arrangement)
    for spec in ["fp16", "int8:rounding=nearest", "onebit", "topk:0.1"]:
        (result,) = plane.allreduce([draw(plane.rank, 60, 70)], codec=spec, op=ReduceOp.AVERAGE)
        assert torch.allclose(
            result, mean_of_sent(spec, plane.size, 60, 70), atol=2e-3 if spec == "fp16" else 1e-5
        )
        assert_same_bits(result)
        payload = [nbytes for phase, _, nbytes in plane.spans.seen if phase == "compressed"][-1]
        assert payload == fc.parse(spec).payload_bytes(fc.BucketInfo.of([("t", (60, 70))]))
    plane.close()


@ranks(2)
def test_every_form_compresses(hvd):
    expected = mean_of_sent("topk:0.1", 2, 10, 10)
    mine = draw(hvd.rank(), 10, 10)
    method = hvd.Compression.topk(0.1)
    assert torch.allclose(hvd.allreduce(mine, compression=method), expected)
    assert torch.allclose(hvd.allreduce_async(mine, name="a", compression="topk:0.1").result(), expected)
    for form in (hvd.allreduce_, lambda *a, **k: hvd.allreduce_async_(*a, **k).result()):
        written = mine.clone()
        assert form(written, name="b", compression=fc.topk(0.1)) is written
        assert torch.allclose(written, expected)
    assert torch.equal(mine, draw(hvd.rank(), 10, 10))


@ranks(2)
def test_the_tensors_of_a_group_are_one_bucket_for_each_dtype(hvd):
    tensors = [torch.full((3,), 5.0), torch.full((4,), 1.0), torch.full((2,), 2.0, dtype=torch.float16)]
    one, other, half = hvd.grouped_allreduce(tensors, compression=fc.topk(3 / 7))
    assert one.tolist() == [5.0] * 3
    assert other.tolist() == [0.0] * 4
    assert half.tolist() == [2.0, 0.0]
    assert half.dtype == torch.float16


@ranks(2)
def test_a_tensor_with_strides_and_scale_factors(hvd):
    mine = draw(hvd.rank(), 8, 6).t()
    result = hvd.allreduce(
        mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0, compression=fc.int8(rounding="nearest")
    )
    assert torch.allclose(result, hvd.allreduce(mine, op=hvd.Sum) * 2, atol=0.2)


@ranks(2, 3)
def test_feedback_sends_everything_in_the_end(hvd):
    memory = fc.Feedback(fc.topk(0.1))
    total = torch.zeros(5, 4)
    mine = draw(hvd.rank(), 5, 4)
    for _ in range(30):
        total += hvd.allreduce(mine, name="t", compression=memory)
    left = hvd.allreduce(memory.memories.residual("t").view(5, 4))
    assert torch.allclose(total + left, 30 * hvd.allreduce(mine), atol=1e-3)


@ranks(2)
def test_gradients_flow_through_a_compressed_all_reduce(hvd):
    mine = torch.ones(4, requires_grad=True)
    hvd.allreduce(mine, op=hvd.Sum, compression=fc.topk(0.5)).sum().backward()
    assert mine.grad.tolist() == [2.0] * 4


@ranks(1, 2)
def test_a_tensor_without_elements(hvd):
    for spec in METHODS:
        assert hvd.allreduce(torch.empty(0, 3), compression=spec).shape == (0, 3)


@ranks(3)
def test_a_process_set_compresses_by_itself(hvd):
    pair = hvd.add_process_set([0, 2])
    if pair.included():
        result = hvd.allreduce(
            torch.full((4,), float(hvd.rank())), compression="randomk:0.5", process_set=pair
        )
        assert sorted(result.tolist()) == [0.0, 0.0, 2.0, 2.0]
    hvd.remove_process_set(pair)


@ranks(2)
def test_a_rank_that_has_joined_sends_zeros(hvd):
    if hvd.rank() == 0:
        result = hvd.allreduce(torch.full((4,), 6.0), name="t", compression="int8:rounding=nearest")
        assert result.tolist() == [3.0] * 4
        result = hvd.allreduce(torch.full((4,), 6.0), name="t", compression="powersgd:1")
        assert result.tolist() == [3.0] * 4
    hvd.join()


@ranks(2)
def test_ranks_that_compress_differently_are_told_both(hvd):
    for mine, theirs in ((fc.topk(0.1), fc.topk(0.2)), (fc.topk(0.1), hvd.Compression.none)):
        with pytest.raises(hvd.MismatchError, match=r"ranks disagree about 't'.*compression") as caught:
            hvd.allreduce(torch.ones(50), name="t", compression=(mine, theirs)[hvd.rank()])
        assert "topk:ratio=0.1," in str(caught.value)
        assert ("topk:ratio=0.2," in str(caught.value)) or ("compression none" in str(caught.value))
    assert hvd.allreduce(torch.ones(3), name="t").tolist() == [1.0] * 3


@ranks(1)
def test_what_cannot_be_compressed_is_refused(hvd):
    with pytest.raises(TypeError, match="'t' is of dtype int64, but topk"):
        hvd.allreduce(torch.ones(3, dtype=torch.int64), name="t", compression=fc.topk(0.1))
    for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        with pytest.raises(ValueError, match="Sum or Average"):
            hvd.allreduce(torch.ones(3), op=op, compression=fc.topk(0.1))
    with pytest.raises(ValueError, match="not with reducescatter"):
        hvd.reducescatter(torch.ones(3), compression="int8")
    with pytest.raises(ValueError, match="there is no compressor 'top'"):
        hvd.allreduce(torch.ones(3), compression="top:0.1")
    with pytest.raises(ValueError, match="topk needs a ratio"):
        hvd.allreduce(torch.ones(3), compression=hvd.Compression.topk)
    assert hvd.allreduce(torch.ones(3), compression=hvd.Compression.int8).tolist() == [1.0] * 3
    with pytest.raises(ValueError, match="needs name="):
        hvd.allreduce(torch.ones(3), compression=fc.Feedback(fc.topk(0.1)))
    with pytest.raises(TypeError, match="cannot be used here"):
        hvd.allreduce_(torch.ones(3), compression=object())
    memory = fc.Feedback(fc.topk(0.5))
    hvd.allreduce(torch.ones(4), name="t", compression=memory)
    with pytest.raises(ValueError, match="residual of 't' has 4 elements"):
        hvd.allreduce(torch.ones(5), name="t", compression=memory)


@ranks(2)
def test_statistics_tell_the_bytes_before_and_after(hvd):
    before = hvd.stats()
    hvd.allreduce(torch.ones(1000), name="t", compression="topk:0.01")
    done = hvd.stats().since(before)
    assert (done.compressed_bytes, done.payload_bytes) == (4000, 80)
    assert done.compression_ratio == 50
