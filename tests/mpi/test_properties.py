"""What must hold whatever the settings, the order and the timing."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import same_every_time
from tests.ranks import ranks

same_every_time()
INIT = None
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8]


def digest(tensors: list[torch.Tensor]) -> bytes:
    import hashlib

    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.digest()


def inputs(rank: int, seed: int, count: int) -> list[torch.Tensor]:
    """Tensors of this rank: shapes and dtypes from the seed, values from seed and rank."""
    shape_chance = random.Random(seed)
    values = torch.Generator().manual_seed(1000 * seed + rank)
    made = []
    for _ in range(count):
        shape = tuple(shape_chance.randrange(0, 60) for _ in range(shape_chance.randrange(0, 3)))
        dtype = shape_chance.choice(DTYPES)
        made.append((torch.rand(shape, generator=values) * 20).to(dtype))
    return made


def reduced(hvd: Any, tensors: list[torch.Tensor], *, seed: int, naps: bool) -> list[torch.Tensor]:
    """All-reduce by name, in an order and with pauses of this rank's own."""
    chance = random.Random(seed * 31 + hvd.rank())
    handles = {}
    for index in chance.sample(range(len(tensors)), len(tensors)):
        handles[index] = hvd.allreduce_async(tensors[index], name=f"t{index}", op=hvd.Sum)
        if naps and chance.random() < 0.2:
            time.sleep(chance.random() * 2e-3)
    return [handles[index].result(30) for index in range(len(tensors))]


@ranks(2, 3, 4)
def test_results_do_not_depend_on_threshold_cycle_time_or_order() -> None:
    import fusion.torch as hvd

    reference: list[torch.Tensor] | None = None
    for threshold, cycle_time in [(0.0, 0.0), (0.0005, 1.0), (0.01, 5.0), (64.0, 0.2), (64.0, 20.0)]:
        hvd.init(fusion_threshold_mb=threshold, cycle_time_ms=cycle_time)
        mine = inputs(hvd.rank(), seed=7, count=25)
        before = [tensor.clone() for tensor in mine]
        for repeat in range(2):
            results = reduced(hvd, mine, seed=repeat, naps=True)
            assert len(set(hvd.allgather_object(digest(results)))) == 1
            if reference is None:
                reference = results
            for result, expected in zip(results, reference, strict=True):
                assert result.dtype == expected.dtype
                tolerance = 0 if not result.is_floating_point() else 1e-2 if result.itemsize == 2 else 1e-5
                torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
        assert all(torch.equal(one, other) for one, other in zip(mine, before, strict=True))
        hvd.shutdown()


@ranks(2, 3)
def test_sums_are_right_and_the_same_bits_on_every_rank() -> None:
    import fusion.torch as hvd

    hvd.init()
    size = hvd.size()

    @settings(max_examples=15)
    @given(seed=st.integers(0, 2**20), count=st.integers(1, 12))
    def check(seed: int, count: int) -> None:
        results = reduced(hvd, inputs(hvd.rank(), seed, count), seed=seed, naps=False)
        everyone = [inputs(rank, seed, count) for rank in range(size)]
        for index, result in enumerate(results):
            dtype = result.dtype
            wide = torch.float64 if dtype.is_floating_point else dtype
            expected = (
                torch.stack([tensors[index].to(wide) for tensors in everyone]).sum(0, dtype=wide).to(dtype)
            )
            tolerance = 0.0 if not dtype.is_floating_point else 2 * torch.finfo(dtype).eps
            torch.testing.assert_close(result, expected, rtol=tolerance, atol=0.0)
        assert len(set(hvd.allgather_object(digest(results)))) == 1

    check()
    hvd.shutdown()


def odd(kind: str, hvd: Any) -> dict[str, Any]:
    """What the last rank submits, where the others submit a float32 sum of shape (4, 2)."""
    ordinary: dict[str, Any] = {"tensor": torch.ones(4, 2), "op": hvd.Sum}
    return ordinary | {
        "shape": {"tensor": torch.ones(4, 3)},
        "shape with as many elements": {"tensor": torch.ones(2, 4)},
        "dtype": {"tensor": torch.ones(4, 2, dtype=torch.float64)},
        "reduce op": {"op": hvd.Max},
        "prescale factor": {"prescale_factor": 0.5},
        "postscale factor": {"postscale_factor": 2.0},
    }.get(kind, {})


@ranks(2, 3, 4)
@pytest.mark.parametrize(
    "kind",
    [
        "shape",
        "shape with as many elements",
        "dtype",
        "reduce op",
        "prescale factor",
        "postscale factor",
        "operation",
        "root rank",
    ],
)
def test_a_mismatch_of_one_rank_raises_on_all_and_the_runtime_still_works(kind: str) -> None:
    import fusion.torch as hvd

    hvd.init()
    last = hvd.rank() == hvd.size() - 1
    neighbour = hvd.allreduce_async(torch.ones(3), name="neighbour", op=hvd.Sum)
    for attempt in ("not seen before", "cached"):
        if kind == "root rank":
            handle = hvd.broadcast_async(torch.ones(4, 2), root_rank=int(last), name="x")
        elif kind == "operation" and last:
            handle = hvd.broadcast_async(torch.ones(4, 2), root_rank=0, name="x")
        else:
            arguments = odd(kind if last else "none", hvd)
            handle = hvd.allreduce_async(arguments.pop("tensor"), name="x", **arguments)
        error = handle.exception(timeout=30)
        assert isinstance(error, hvd.MismatchError), attempt
        assert "'x'" in str(error) and f"rank {hvd.size() - 1}" in str(error)
        assert kind.removesuffix(" with as many elements") in str(error)
        assert len(set(hvd.allgather_object(str(error)))) == 1
        good = hvd.allreduce(torch.ones(4, 2), name="x", op=hvd.Sum)
        assert torch.equal(good, torch.full((4, 2), float(hvd.size())))
    assert neighbour.result(30).tolist() == [hvd.size()] * 3
    hvd.shutdown()


@ranks(2)
def test_a_request_keeps_its_tensor_alive_and_lets_go_of_it_when_done() -> None:
    import gc
    import weakref

    import fusion.torch as hvd

    hvd.init()
    handles = [
        hvd.allreduce_async(torch.full((1000,), float(i)), name=str(i), op=hvd.Sum) for i in range(100)
    ]
    gc.collect()
    clutter = [torch.rand(1000) for _ in range(200)]
    assert [handle.result(30)[0].item() for handle in handles] == [2.0 * i for i in range(100)]
    tensor = torch.ones(10)
    reference = weakref.ref(tensor)
    hvd.allreduce(tensor, name="once")
    del tensor, clutter
    gc.collect()
    assert reference() is None
    hvd.shutdown()
