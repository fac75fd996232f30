"""All-reduce on the data plane alone: one node, several, uneven ones, and the flat ring."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fusion.channel
import fusion.cuda_executor
import fusion.executor
from coordinator.messages import ITEM_SIZE, OpKind, ReduceOp, Region, Request
from fusion.collectives import chooser
from fusion.collectives.doubling import Doubling
from fusion.collectives.pipeline import Crossing
from fusion.collectives.ring import Ring
from fusion.dtypes import name_of, to_torch
from fusion.executor import CpuExecutor
from tests.mpi.plane import EVERYWHERE, Plane, Settings, assert_same_bits, draw, entry
from tests.ranks import ranks

INIT = None
SHORT_BYTES = chooser.SHORT_BYTES
DOUBLED = "a node each"
"""Here ranks reduce by recursive doubling, of 2, 3 and 4."""
RINGED = "ring of all"
"""Here by the ring alone; in other arrangements, by both in turns."""
MIXED_BYTES = 1 << 12
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@pytest.fixture(scope="module", params=EVERYWHERE)
def plane(request: pytest.FixtureRequest) -> Iterator[Plane]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fusion.executor, "LEAST_BUFFER_BYTES", 1)
        patch.setattr(fusion.cuda_executor, "LEAST_BUFFER_BYTES", 1)
        longest = {DOUBLED: SHORT_BYTES, RINGED: -1}.get(request.param, MIXED_BYTES)
        patch.setattr(chooser, "SHORT_BYTES", longest)
        made = Plane(request.param)
        yield made
        made.close()


def everyones(plane: Plane, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """The inputs of all ranks, stacked."""
    return torch.stack([draw(rank, *shape, dtype=dtype, seed=seed) for rank in range(plane.size)])


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("count", [0, 1, 7, 1024, 2049, 50_001])
def test_a_sum_of_any_length_is_right_and_the_same_everywhere(plane: Plane, count: int) -> None:
    (result,) = plane.allreduce([draw(plane.rank, count)])
    torch.testing.assert_close(result, everyones(plane, count).sum(0))
    assert_same_bits(result)


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", FLOATS)
def test_an_average_of_floats_is_rounded_once(plane: Plane, dtype: torch.dtype) -> None:
    (result,) = plane.allreduce([draw(plane.rank, 9000, dtype=dtype)], ReduceOp.AVERAGE)
    assert result.dtype == dtype
    exact = everyones(plane, 9000, dtype=dtype).double().mean(0)
    rounding = torch.finfo(dtype).eps / 2
    slack = 8 * torch.finfo(torch.float32 if dtype.itemsize == 2 else dtype).eps
    assert ((result.double() - exact).abs() <= exact.abs() * rounding + slack).all()
    assert_same_bits(result)


@ranks(2, 3, 4)
def test_sixteen_bit_sums_do_not_overflow_on_the_way(plane: Plane) -> None:
    (result,) = plane.allreduce([torch.full((5000,), 40_000.0, dtype=torch.float16)], ReduceOp.AVERAGE)
    assert (result == 40_000.0).all()


@ranks(3, 4)
def test_sixteen_bit_sums_keep_small_terms(plane: Plane) -> None:
    mine = torch.full((3000,), 256.0 if plane.rank == 0 else 1.0, dtype=torch.bfloat16)
    (result,) = plane.allreduce([mine])
    assert (result == torch.tensor(256.0 + plane.size - 1).bfloat16()).all()


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT])
def test_integers_are_exact(plane: Plane, dtype: torch.dtype, op: ReduceOp) -> None:
    (result,) = plane.allreduce([draw(plane.rank, 3001, dtype=dtype)], op)
    wide = everyones(plane, 3001, dtype=dtype).long()
    expected = {
        ReduceOp.SUM: wide.sum(0),
        ReduceOp.AVERAGE: wide.sum(0).div(plane.size, rounding_mode="trunc"),
        ReduceOp.MIN: wide.amin(0),
        ReduceOp.MAX: wide.amax(0),
        ReduceOp.PRODUCT: wide.prod(0),
    }[op]
    assert torch.equal(result, expected.to(dtype))


@ranks(2, 3)
def test_the_average_of_negative_integers_is_truncated_toward_zero(plane: Plane) -> None:
    (result,) = plane.allreduce([torch.tensor([-5 if plane.rank == 0 else 0])], ReduceOp.AVERAGE)
    assert result.tolist() == [-(5 // plane.size)]


@ranks(1, 2, 3, 4)
def test_bools_are_any_or_all(plane: Plane) -> None:
    mine, all_inputs = draw(plane.rank, 3001, dtype=torch.bool), everyones(plane, 3001, dtype=torch.bool)
    for op, expected in (
        (ReduceOp.SUM, all_inputs.any(0)),
        (ReduceOp.MAX, all_inputs.any(0)),
        (ReduceOp.MIN, all_inputs.all(0)),
        (ReduceOp.PRODUCT, all_inputs.all(0)),
    ):
        (result,) = plane.allreduce([mine], op)
        assert torch.equal(result, expected)


@ranks(2)
def test_an_average_of_bools_is_refused_and_the_next_operation_works(plane: Plane) -> None:
    with pytest.raises(ValueError, match="bool"):
        plane.allreduce([torch.ones(3, dtype=torch.bool)], ReduceOp.AVERAGE)
    assert plane.allreduce([torch.ones(3)])[0].tolist() == [plane.size] * 3


@ranks(2, 4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
def test_min_and_max_propagate_nan(plane: Plane, dtype: torch.dtype, op: ReduceOp) -> None:
    mine = draw(plane.rank, 2000, dtype=dtype)
    if plane.rank == plane.size - 1:
        mine[::3] = float("nan")
    (result,) = plane.allreduce([mine], op)
    assert result[::3].isnan().all() and not result[1::3].isnan().any()
    assert_same_bits(result)


@ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", FLOATS)
def test_scale_factors_multiply_before_and_after(plane: Plane, dtype: torch.dtype) -> None:
    mine = draw(plane.rank, 3001, dtype=dtype)
    (result,) = plane.allreduce([mine], ReduceOp.MAX, prescale=-0.5, postscale=3.0)
    expected = (everyones(plane, 3001, dtype=dtype).double() * -0.5).amax(0) * 3.0
    torch.testing.assert_close(result, expected.to(dtype))


@ranks(1, 2, 3)
def test_integers_are_scaled_in_double_and_truncated_each_time(plane: Plane) -> None:
    mine = torch.tensor([7, -7]) * (plane.rank + 1)
    (result,) = plane.allreduce([mine], prescale=0.5, postscale=0.3)
    half = sum(int(7 * (rank + 1) * 0.5) for rank in range(plane.size))
    assert result.tolist() == [int(half * 0.3), -int(half * 0.3)]


@ranks(1, 2, 3, 4)
def test_a_fused_response_gives_each_tensor_its_own_sum(plane: Plane) -> None:
    shapes = [(), (3,), (0, 5), (40, 41), (1,), (70, 80), (2, 2, 2), (0,), (5000,)]
    mine = [draw(plane.rank, *shape, seed=index) for index, shape in enumerate(shapes)]
    for _ in range(3):  # The prepared views of the first time must serve the others.
        results = plane.allreduce(mine)
        for index, (shape, result) in enumerate(zip(shapes, results, strict=True)):
            assert result.shape == shape
            torch.testing.assert_close(result, everyones(plane, *shape, seed=index).sum(0))
        assert_same_bits(*results)


@ranks(2, 3)
def test_a_response_that_comes_again_works_on_the_tensors_it_comes_with(plane: Plane) -> None:
    request = Request("w", OpKind.ALLREDUCE, ("float32",), ((300,),))
    response = plane.response_of([entry(request, torch.empty(300), None)])
    for value in (1.0, 2.0, 3.0):
        made = entry(request, torch.full((300,), value), torch.empty(300))
        plane.execute([made], response)
        assert (made.outputs[0] == value * plane.size).all()


@ranks(1, 2, 3)
def test_the_input_stays_as_it_is_and_the_output_is_memory_of_its_own(plane: Plane) -> None:
    mine = draw(plane.rank, 4000)
    (result,) = plane.allreduce([mine])
    kept = result.clone()
    assert torch.equal(mine, draw(plane.rank, 4000))
    plane.allreduce([torch.zeros(4000)])
    assert torch.equal(result, kept)


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("rows", [3, 900])
def test_strided_views_are_reduced_by_index_and_their_neighbours_left_alone(plane: Plane, rows: int) -> None:
    base = draw(plane.rank, rows, 7)
    plane.allreduce([base[:, 1], base.t()[3:5]], in_place=True)
    expected = draw(plane.rank, rows, 7)
    total = everyones(plane, rows, 7).sum(0)
    expected[:, 1], expected[:, 3:5] = total[:, 1], total[:, 3:5]
    torch.testing.assert_close(base, expected)


@ranks(1, 2, 3)
def test_layouts_that_differ_between_ranks_are_reduced_by_index(plane: Plane) -> None:
    mine = draw(plane.rank, 4, 6, 5, 30)
    if plane.rank == 0:
        mine = mine.to(memory_format=torch.channels_last)
    strides = mine.stride()
    (result,) = plane.allreduce([mine])
    torch.testing.assert_close(result, everyones(plane, 4, 6, 5, 30).sum(0))
    assert result.stride() == strides
    assert_same_bits(result)


@ranks(2)
def test_an_expanded_input_is_read_by_index(plane: Plane) -> None:
    mine = torch.arange(3.0).expand(2000, 3)
    (result,) = plane.allreduce([mine])
    assert torch.equal(result, plane.size * mine)


@ranks(2)
def test_parameters_that_require_gradients_are_reduced_in_place(plane: Plane) -> None:
    weight = torch.nn.Parameter(torch.ones(3000))
    plane.allreduce([weight, torch.nn.Parameter(torch.ones(2))], in_place=True)
    assert (weight == plane.size).all() and weight.grad_fn is None


@ranks(2, 3)
def test_messages_longer_than_mpi_counts_are_cut(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion.channel, "MAX_MESSAGE_BYTES", 100)
    (result,) = plane.allreduce([draw(plane.rank, 2501)])
    torch.testing.assert_close(result, everyones(plane, 2501).sum(0))


@ranks(1, 2, 3, 4)
def test_results_depend_on_how_tensors_are_fused_in_a_ring_only(plane: Plane) -> None:
    mine = [draw(plane.rank, count, seed=count) for count in (10, 3000, 1, 6000)]
    together = plane.allreduce(mine)
    alone = [plane.allreduce([tensor])[0] for tensor in mine]
    for one, other in zip(together, alone, strict=True):
        # A ring of more than two adds in an order that depends on where a tensor lies.
        torch.testing.assert_close(one, other)
        if len(plane.topology.nodes) == 1 or plane.arrangement == DOUBLED:
            assert torch.equal(one, other)


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("count", [5, 20_000])
def test_a_bucket_in_an_arena_is_reduced_where_it_lies(plane: Plane, dtype: torch.dtype, count: int) -> None:
    arena = plane.one(OpKind.ARENA, torch.empty(64 + 8 * count, dtype=torch.uint8))[0]
    name = str(dtype).removeprefix("torch.")
    bucket = arena.tensor(64, (count,), name)
    bucket.copy_(draw(plane.rank, count, dtype=dtype))
    guard = arena.tensor(0, (64,), "uint8")
    guard.fill_(7)
    request = plane.request(
        Request("b", OpKind.ALLREDUCE, (name,), ((count,),), region=Region(arena.number, 64))
    )
    for _ in range(2):
        made = entry(request, bucket, bucket)
        plane.execute([made])
    once = everyones(plane, count, dtype=dtype).double().sum(0).to(dtype)
    torch.testing.assert_close(bucket.cpu(), once * plane.size, rtol=2e-2, atol=1e-4)
    assert (guard == 7).all()
    assert_same_bits(bucket)


@ranks(2, 3, 4)
def test_responses_that_are_under_way_together_do_not_disturb_one_another(plane: Plane) -> None:
    """Large and small ones, in buffers and in place, begun by ranks that are out of step."""
    if plane.on_device:
        pytest.skip("a device has an order of its own")
    arena = plane.one(OpKind.ARENA, torch.empty(4 * 30_000, dtype=torch.uint8))[0]
    bucket = arena.tensor(0, (30_000,), "float32")
    in_place = Request("b", OpKind.ALLREDUCE, ("float32",), ((30_000,),), region=Region(arena.number, 0))
    dtypes = (torch.float32, torch.bfloat16, torch.int64)
    for seed in range(3):
        tensors, works = [], []
        for index, count in enumerate([50_000, 3, 20_000, 0, 70_000, 1, 30_000, 9]):
            tensor = draw(plane.rank, count, dtype=dtypes[index % 3], seed=seed)
            request = Request(f"t{index}", OpKind.ALLREDUCE, (name_of(tensor.dtype),), ((count,),))
            if index == 6:
                request, tensor = in_place, bucket.copy_(tensor)
            time.sleep(0.002 * ((plane.rank + index) % 2))
            tensors.append(tensor)
            works.append(plane.begin([entry(request, tensor, tensor)]))
        for work in filter(None, works):
            plane.waiter.until(work.done)
        for tensor in tensors:
            total = everyones(plane, len(tensor), dtype=tensor.dtype, seed=seed).double().sum(0)
            torch.testing.assert_close(tensor.double(), total, rtol=2e-2, atol=1e-1)
            assert_same_bits(tensor)


@ranks(2)
def test_what_cannot_be_left_under_way_waits_for_what_is(plane: Plane) -> None:
    if plane.on_device:
        pytest.skip("a device has an order of its own")
    tensor = torch.full((60_000,), 1.0 + plane.rank)
    request = Request("t", OpKind.ALLREDUCE, ("float32",), ((60_000,),))
    work = plane.begin([entry(request, tensor, tensor)])
    (gathered,) = plane.one(OpKind.ALLGATHER, torch.full((2, 1), float(plane.rank)))
    assert work is None or work.done()
    assert tensor.eq(3.0).all() and gathered.flatten().tolist() == [0.0, 0.0, 1.0, 1.0]


@ranks(2)
def test_arenas_are_numbered_alike_and_outlive_the_executor(plane: Plane) -> None:
    first, second = (plane.one(OpKind.ARENA, torch.empty(100, dtype=torch.uint8))[0] for _ in range(2))
    assert second.number == first.number + 1 and first.nbytes == 100
    tensor = first.tensor(4, (2, 3), "float32")
    del first, second
    plane.host._arenas.clear()
    tensor.fill_(3.0)
    assert tensor.sum() == 18.0


@ranks(2)
def test_a_request_for_an_arena_that_is_not_there_is_refused(plane: Plane) -> None:
    request = plane.request(Request("b", OpKind.ALLREDUCE, ("float32",), ((4,),), region=Region(10**6, 0)))
    with pytest.raises(ValueError, match="arena 1000000"):
        plane.execute([entry(request, torch.zeros(4), torch.zeros(4))])


@ranks(2, 3)
def test_memory_that_does_not_fit_is_the_same_clear_error_on_every_rank(plane: Plane) -> None:
    with pytest.raises(Exception, match=r"shared memory.*chunk_kb.*--shm-size"):
        CpuExecutor(plane.topology, plane.waiter, plane.spans, Settings(chunk_kb=1 << 40))
    assert plane.allreduce([torch.ones(2)])[0].tolist() == [plane.size] * 2


@ranks(1, 2)
def test_every_phase_is_reported_with_the_names_it_was_about(plane: Plane) -> None:
    plane.spans.seen.clear()
    plane.allreduce([torch.ones(10), torch.ones(20)])
    phases = {"pack", "reduce"} if plane.on_device else {"pack", "reduce", "unpack"}
    assert {phase for phase, _, _ in plane.spans.seen} >= phases
    for phase in phases - {"reduce"}:
        assert [(names, nbytes) for seen, names, nbytes in plane.spans.seen if seen == phase] == [
            (("t0", "t1"), 120)
        ]


@ranks(2)
def test_every_supported_dtype_has_a_sum(plane: Plane) -> None:
    for name in ITEM_SIZE:
        (result,) = plane.allreduce([torch.ones(5, dtype=to_torch(name))])
        assert result.tolist() == [True if name == "bool" else plane.size] * 5


class Taken(list[str]):
    """Which way payloads between nodes went."""

    def watch(self, patch: pytest.MonkeyPatch, way: type[Ring | Doubling]) -> None:
        whole = way.begin_all_reduce

        def noted(self_: Any, *arguments: Any) -> Crossing:
            self.append(way.__name__)
            return whole(self_, *arguments)

        patch.setattr(way, "begin_all_reduce", noted)


@ranks(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_partial_results_are_doubled_and_longer_ones_go_around_the_ring(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    taken = Taken()
    taken.watch(monkeypatch, Ring)
    taken.watch(monkeypatch, Doubling)
    plane = Plane("a node each", Settings(fusion_threshold_mb=1.0, chunk_kb=64))
    monkeypatch.setattr(chooser, "SHORT_BYTES", SHORT_BYTES)
    longest = SHORT_BYTES // 4  # 16-bit floats are partial sums in float32.
    for count in (longest, longest + 1):
        (result,) = plane.allreduce([draw(plane.rank, count, dtype=dtype)])
        expected = everyones(plane, count, dtype=dtype).double().sum(0).to(dtype)
        torch.testing.assert_close(result, expected)
        assert_same_bits(result)
    plane.close()
    assert taken == ["Doubling", "Ring"]
