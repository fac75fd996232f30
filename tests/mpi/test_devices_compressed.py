"""Compression on devices: what arrives is what the compressors for CPUs make of it.

On a double of a GPU, or, with FUSION_TEST_GPU=1, on the real one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import fusion.compression as fc
from coordinator.messages import OpKind, ReduceOp
from fusion.compression.feedback import Ledger
from tests.mpi.plane import DEVICE_ARRANGEMENTS, REAL_GPU, Plane, Settings, assert_same_bits, draw, entry
from tests.ranks import ranks

INIT = None
COMM = "cupy.cuda.nccl.NcclCommunicator"
SHAPE = (61, 73)
INFO = fc.BucketInfo.of([("t", SHAPE)])
EXACT = ["int8:rounding=nearest,block=64", "topk:0.1"]
"""Methods of which a device makes the same bits as the CPU."""
GATHERED = [*EXACT, "onebit:64"]
double_only = pytest.mark.skipif(REAL_GPU, reason="looks at the calls of a double")


@pytest.fixture(scope="module", params=list(DEVICE_ARRANGEMENTS))
def plane(request: pytest.FixtureRequest) -> Iterator[Plane]:
    made = Plane(request.param)
    yield made
    made.close()


@pytest.fixture(scope="module")
def by_nccl() -> Iterator[Plane]:
    made = Plane("device")
    yield made
    made.close()


def reduce(plane: Plane, tensors: list[torch.Tensor], ledger: Ledger | None = None, **options: Any) -> Any:
    """One response with these tensors; the outputs."""
    outputs = [torch.empty_like(tensor) for tensor in tensors]
    extra = None if ledger is None else {"float32": ledger}
    made = [
        entry(plane._request(OpKind.ALLREDUCE, tensor, name=f"t{n}", **options), tensor, output, extra)
        for n, (tensor, output) in enumerate(zip(tensors, outputs, strict=True))
    ]
    plane.execute(made)
    return outputs


@contextmanager
def on_cpus(plane: Plane) -> Iterator[Plane]:
    """The same ranks with the tensors in host memory."""
    before = plane.executor, plane.on_device
    plane.executor, plane.on_device = plane.host, False
    yield plane
    plane.executor, plane.on_device = before


def assert_as_on_cpus(plane: Plane, tensors: list[torch.Tensor], exact: bool, **options: Any) -> None:
    results = reduce(plane, tensors, **options)
    with on_cpus(plane):
        wanted = reduce(plane, tensors, **options)
    tolerance = 0.0 if exact else 1e-5
    torch.testing.assert_close(results, wanted, rtol=tolerance, atol=tolerance)
    assert_same_bits(*results)


@ranks(2, 4)
@pytest.mark.parametrize("spec", GATHERED)
def test_what_arrives_is_what_arrives_on_cpus(plane: Plane, spec: str) -> None:
    tensors = [draw(plane.rank, *SHAPE), draw(plane.rank, 301, seed=1)]
    assert_as_on_cpus(plane, tensors, spec in EXACT, codec=spec, op=ReduceOp.AVERAGE)
    payloads = [nbytes for phase, _, nbytes in plane.spans.seen if phase == "compressed"][-2:]
    info = fc.BucketInfo.of([("t", SHAPE), ("u", (301,))])
    assert payloads == [fc.parse(spec).payload_bytes(info)] * 2


@ranks(2)
@pytest.mark.parametrize("spec", ["fp16", "bf16", "powersgd:2"])
def test_so_it_is_with_methods_that_ride_a_sum_or_are_left_to_the_host(plane: Plane, spec: str) -> None:
    options = {"codec": spec, "op": ReduceOp.AVERAGE}
    assert_as_on_cpus(plane, [draw(plane.rank, 40, 50, seed=2)], True, **options)


@ranks(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_strides_scale_factors_and_other_floats(by_nccl: Plane, dtype: torch.dtype) -> None:
    options = {"codec": "topk:0.2", "op": ReduceOp.SUM, "prescale": 0.3, "postscale": 7.0}
    assert_as_on_cpus(by_nccl, [draw(by_nccl.rank, 8, 6, dtype=dtype).t()], True, **options)


@ranks(2)
def test_numbers_for_rounding_are_other_ones_each_time_and_on_each_rank(by_nccl: Plane) -> None:
    same, method = draw(0, *SHAPE), fc.int8(64)
    first, second = (reduce(by_nccl, [same], codec=method.spec, op=ReduceOp.AVERAGE)[0] for _ in range(2))
    assert not torch.equal(first, second)
    scales, _ = method.parts(method.encode(same.flatten(), INFO, fc.Key(0)), INFO)
    steps = first.flatten() / scales.repeat_interleave(64)[: INFO.count]
    exact = same.flatten() / scales.repeat_interleave(64)[: INFO.count]
    assert ((steps - exact).abs() < 1.001).all() and (steps - exact).mean().abs() < 0.05
    # The mean of two ranks that rounded differently is between two steps.
    assert ((steps - steps.round()).abs() > 0.4).any()


@ranks(2, 4)
@pytest.mark.parametrize("spec", [f"{EXACT[0]},feedback=on", EXACT[1]])
def test_what_is_remembered_is_what_a_cpu_remembers_and_either_goes_on_with_it(
    plane: Plane, spec: str
) -> None:
    mine, theirs = fc.Memories(), fc.Memories()
    ledgers = [memories.open(INFO, feedback=True) for memories in (mine, theirs)]
    for step in range(6):
        if step == 3:  # As a checkpoint would be moved.
            states = mine.state_dict(), theirs.state_dict()
            mine.load_state_dict(states[1])
            theirs.load_state_dict(states[0])
        tensor = draw(plane.rank, *SHAPE, seed=step)
        (result,) = reduce(plane, [tensor], ledgers[0], codec=spec, op=ReduceOp.AVERAGE)
        with on_cpus(plane):
            (wanted,) = reduce(plane, [tensor], ledgers[1], codec=spec, op=ReduceOp.AVERAGE)
        for ledger in ledgers:
            ledger.commit()
        assert torch.equal(result, wanted)
        kept = mine.residual("t")
        assert kept is not None and kept.is_cuda == REAL_GPU
        assert torch.equal(kept.cpu(), theirs.residual("t"))
    assert kept.any()


@ranks(2)
@pytest.mark.parametrize("spec", ["int8:64,feedback=on", "onebit:64", "topk:0.1", "fp16:feedback=on"])
def test_what_is_not_finite_on_one_rank_is_nan_on_all_and_remembered_by_none(
    by_nccl: Plane, spec: str
) -> None:
    memories = fc.Memories()
    ledger = memories.open(INFO, feedback=True)
    for step in range(4):
        tensor = draw(by_nccl.rank, *SHAPE, seed=step)
        spoilt = step in (0, 2)
        if spoilt and by_nccl.rank == 1:
            tensor[5, 5] = float("inf") if step else float("nan")
        before = memories.residual("t")
        (result,) = reduce(by_nccl, [tensor], ledger, codec=spec, op=ReduceOp.AVERAGE)
        ledger.commit()
        after = memories.residual("t")
        assert result.isnan().any() == spoilt and after.isfinite().all()
        unchanged = not after.any() if before is None else torch.equal(after, before)
        assert unchanged == spoilt


@ranks(2)
def test_a_parameter_that_was_not_used_keeps_its_residual(by_nccl: Plane) -> None:
    info, memories = fc.BucketInfo.of([("a", (40,)), ("b", (30,))]), fc.Memories()
    ledger = memories.open(info, feedback=True)
    for wanted in ([True, True], [False, True]):
        before = memories.residual("a"), memories.residual("b")
        tensors = [draw(by_nccl.rank, count, seed=count) for count in (40, 30)]
        reduce(by_nccl, tensors, ledger, codec="topk:0.1", op=ReduceOp.AVERAGE)
        ledger.commit(wanted)
    assert torch.equal(memories.residual("a"), before[0])
    assert not torch.equal(memories.residual("b"), before[1])


# How it is done.


@double_only
@ranks(2)
@pytest.mark.parametrize("spec", GATHERED)
def test_nccl_moves_the_payload_and_nothing_goes_through_the_host(by_nccl: Plane, spec: str) -> None:
    reduce(by_nccl, [draw(by_nccl.rank, *SHAPE)], codec=spec)
    before = len(by_nccl.gpu.calls)
    reduce(by_nccl, [draw(by_nccl.rank, *SHAPE)], codec=spec)
    calls = by_nccl.gpu.calls[before:]
    (moved,) = [call for call in calls if call.path.startswith(COMM)]
    assert moved.path == f"{COMM}.allGather"
    assert moved.args[2:4] == (fc.parse(spec).payload_bytes(INFO), by_nccl.gpu.modules.nccl.NCCL_UINT8)
    assert "cupy.cuda.alloc_pinned_memory" not in [call.path for call in calls]


@double_only
@ranks(2)
@pytest.mark.parametrize("sums", ["float32", "native"])
def test_casts_move_sixteen_bits_a_value(sums: str) -> None:
    plane = Plane("device", Settings(gpu_sums=sums))
    tensor = draw(plane.rank, *SHAPE)
    (result,) = reduce(plane, [tensor], codec="bf16", op=ReduceOp.AVERAGE)
    exact = torch.stack([draw(rank, *SHAPE) for rank in range(2)]).mean(0)
    torch.testing.assert_close(result, exact, rtol=0.0, atol=0.03)
    bf16 = plane.gpu.modules.nccl.NCCL_BFLOAT16
    moved = [call for call in plane.gpu.calls if call.path.startswith(f"{COMM}.")]
    assert all(bf16 in call.args for call in moved)
    reduced = f"{COMM}.allReduce" in [call.path for call in moved]
    assert reduced == (sums == "native")
    plane.close()


@double_only
@ranks(4)
def test_between_nodes_that_nccl_does_not_reach_only_the_payload_goes_through_the_host() -> None:
    plane = Plane("device, pairs")
    reduce(plane, [draw(plane.rank, *SHAPE)], codec="topk:0.1")
    before = len(plane.gpu.calls)
    reduce(plane, [draw(plane.rank, *SHAPE)], codec="topk:0.1")
    payload = fc.parse("topk:0.1").payload_bytes(INFO)
    pinned = [
        call.args[0] for call in plane.gpu.calls[before:] if call.path == "cupy.cuda.alloc_pinned_memory"
    ]
    assert pinned == [payload, 4 * payload]
    plane.close()


class Unread(TorchDispatchMode):
    """Refuses whatever would make the host wait for a value."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero), func
        return func(*args, **(kwargs or {}))


@double_only
@ranks(2)
@pytest.mark.parametrize("spec", ["int8:64,feedback=on", "onebit:64", "topk:0.1", "bf16:feedback=on"])
def test_the_host_reads_no_value_of_the_device(
    by_nccl: Plane, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    give = by_nccl.gpu.give

    def given(*args: Any) -> None:
        with _disable_current_modes():  # The double may.
            give(*args)

    monkeypatch.setattr(by_nccl.gpu, "give", given)
    memories = fc.Memories()
    ledger = memories.open(INFO, feedback=True)
    for _ in range(3):
        tensor, output = draw(by_nccl.rank, *SHAPE), torch.empty(SHAPE)
        request = by_nccl._request(OpKind.ALLREDUCE, tensor, codec=spec, op=ReduceOp.AVERAGE)
        made = entry(request, tensor, output, {"float32": ledger})
        made.ready = by_nccl.executor.mark(made.inputs, "t")
        response = by_nccl.response_of([made])
        with Unread():
            work = by_nccl.executor.execute(response, [made])
            ledger.commit([True], ledger.arrived)
        by_nccl.waiter.until(work.done)
    assert memories.residual("t") is not None and output.any()


@double_only
@ranks(2)
def test_residuals_that_are_replaced_are_kept_until_the_device_has_read_them(by_nccl: Plane) -> None:
    memories = fc.Memories()
    memories.load_state_dict({"t": {"residual": torch.ones(INFO.count)}})
    ledger = memories.open(INFO, feedback=True, immediate=True)
    loaded = memories._memories["t"].residual
    tensor, output = draw(by_nccl.rank, *SHAPE), torch.empty(SHAPE)
    made = entry(by_nccl._request(OpKind.ALLREDUCE, tensor, codec="topk:0.1"), tensor, output, None)
    made.extra = {"float32": ledger}
    made.ready = by_nccl.executor.mark(made.inputs, "t")
    work = by_nccl.executor.execute(by_nccl.response_of([made]), [made])
    assert memories._memories["t"].residual is not loaded
    assert any(each is loaded for kept in work._kept if isinstance(kept, list) for each in kept)
    by_nccl.waiter.until(work.done)
