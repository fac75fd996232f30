"""Tuning a running job: the same bits, settings that the user gave left alone, and an end in good order."""

from __future__ import annotations

import csv
import itertools
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from mpi4py import MPI

import fusion.torch as hvd
import fusion.tuning.tuner as tuner_module
from coordinator.errors import FusionError, RankLeftError
from coordinator.tuning import Knobs
from fusion import runtime
from fusion.config import Config, load
from fusion.tuning.space import Space, space_of
from tests.mpi.plane import ARRANGEMENTS, Plane, assert_same_bits, digest, draw
from tests.ranks import ranks

INIT = None
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int32)
SAMPLES = 14


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of three steps, however short: these tests are about bits, not about time."""
    monkeypatch.setattr(tuner_module, "LEAST_S", 0.0)
    monkeypatch.setattr(tuner_module, "HOPELESS", 1e9)
    monkeypatch.setattr(tuner_module, "CAREFUL_STEPS", 3)
    monkeypatch.setattr(tuner_module, "CAREFUL_S", 0.0)


def shared_path(tmp_path: Path) -> Path:
    """The folder of rank 0, on every rank."""
    return MPI.COMM_WORLD.bcast(tmp_path, root=0)


def train(steps: int) -> set[str]:
    """The digests of the results of steps that all reduce the same tensors, many at once."""
    # Sizes that cut chunks and buffers in odd places, and too many bytes for the smallest threshold.
    tensors = [
        (f"{dtype}.{index}", draw(hvd.rank(), 3 + 20_011 * index, dtype=dtype, seed=index))
        for dtype in DTYPES
        for index in range(6)
    ]
    found = set()
    for _ in range(steps):
        handles = [hvd.allreduce_async(tensor, name=name, op=hvd.Sum) for name, tensor in tensors]
        found.add(digest(*[handle.result(60) for handle in handles]))
    return found


def used(log: Path) -> list[dict[str, str]]:
    """The settings of every sample."""
    return list(csv.DictReader(log.open()))


@ranks(2, 4)
@pytest.mark.parametrize("nodes", ["one", "two"])
def test_results_have_the_same_bits_with_tuning_and_without(
    nodes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = MPI.COMM_WORLD.size // 2
    if nodes == "two":
        monkeypatch.setenv("FUSION_TEST_NODES", f"{half},{half}")
    hvd.init()
    plain = train(2)
    hvd.shutdown()
    folder = shared_path(tmp_path)
    hvd.init(
        autotune="on",
        autotune_samples=SAMPLES,
        autotune_file=folder / "t.yaml",
        autotune_log=folder / "t.csv",
    )
    # The rest of a step, one that settles, and three that count, for each sample.
    tuned = train(6 * SAMPLES + 10)
    hvd.shutdown()
    assert len(plain) == 1
    assert tuned == plain
    if MPI.COMM_WORLD.rank == 0:
        samples = used(folder / "t.csv")
        assert len(samples) == SAMPLES
        assert len({tuple(row.items())[1:6] for row in samples}) > SAMPLES // 2
        assert load(folder / "t.yaml", environ={}).pinned <= set(Knobs.__struct_fields__)
        assert "Tuned in 14 samples.\n" in (folder / "t.yaml").read_text()


@ranks(2)
def test_keys_that_were_set_keep_their_values_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSION_CHUNK_KB", "333")
    folder = shared_path(tmp_path)
    hvd.init(
        {"cycle_time_ms": 0.5},
        hierarchy="on",
        autotune="on",
        autotune_samples=6,
        autotune_file=folder / "t.yaml",
        autotune_log=folder / "t.csv",
    )
    train(45)
    executor = runtime.current().world.executor
    chunk, hierarchy = executor._means.node.chunk_bytes, executor._hierarchy
    tuned = {"fusion_threshold_mb"} | ({"ring_segment_kb"} if hvd.cross_size() > 1 else set())
    hvd.shutdown()
    assert (chunk, hierarchy) == (332 * 1024, "on")  # Whole pages.
    if MPI.COMM_WORLD.rank == 0:
        rows = used(folder / "t.csv")
        given = {(row["chunk_kb"], row["cycle_time_ms"], row["hierarchy"]) for row in rows}
        assert given == {("333", "0.5", "on")}
        assert len({row["fusion_threshold_mb"] for row in rows}) > 1
        loaded = load(folder / "t.yaml", environ={})
        assert loaded.pinned == {"chunk_kb", "cycle_time_ms", "hierarchy"} | tuned
        assert (loaded.config.chunk_kb, loaded.config.cycle_time_ms) == (333, 0.5)


@ranks(2, 4)
def test_a_rank_that_leaves_during_tuning_is_named_and_what_was_found_is_kept(tmp_path: Path) -> None:
    folder = shared_path(tmp_path)
    hvd.init(autotune="on", autotune_file=folder / "t.yaml")
    train(40)
    last = hvd.size() - 1
    if hvd.rank() == last:
        hvd.shutdown()
    else:
        with pytest.raises(RankLeftError, match=rf"rank {last}: it called shutdown"):
            train(1000)
        hvd.shutdown()
    if MPI.COMM_WORLD.rank == 0:
        assert "the program ended before the search did" in (folder / "t.yaml").read_text()
        load(folder / "t.yaml", environ={})
    MPI.COMM_WORLD.Barrier()


@ranks(4)
def test_process_sets_work_beside_tuning_and_keep_the_settings_they_began_with(tmp_path: Path) -> None:
    folder = shared_path(tmp_path)
    hvd.init(autotune="on", autotune_samples=6, autotune_log=folder / "t.csv")
    begun = runtime.current().config
    pair = hvd.add_process_set([0, 2])
    for step in range(8):
        assert len(train(6)) == 1
        if pair.included():
            total = hvd.allreduce(torch.full((5,), float(hvd.rank() + step)), op=hvd.Sum, process_set=pair)
            assert total.tolist() == [2.0 + 2 * step] * 5
    if pair.included():
        group = runtime.current().group(pair.process_set_id)
        assert group.executor._means.node.chunk_bytes == begun.chunk_kb * 1024
    hvd.remove_process_set(pair)
    hvd.shutdown()
    if MPI.COMM_WORLD.rank == 0:
        assert len(used(folder / "t.csv")) == 6


@ranks(2)
def test_static_buckets_keep_their_layout_and_their_bits(tmp_path: Path) -> None:
    folder = shared_path(tmp_path)
    weights = []
    for settings in ({}, {"autotune": "on", "autotune_samples": 8, "autotune_log": folder / "t.csv"}):
        hvd.init(buckets="static", **settings)
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1e-3), named_parameters=model.named_parameters()
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        for step in range(70):
            optimizer.zero_grad()
            model(draw(hvd.rank(), 4, 64, seed=step)).square().mean().backward()
            optimizer.step()
        weights.append(digest(*model.state_dict().values()))
        hvd.shutdown()
    assert weights[0] == weights[1]
    if MPI.COMM_WORLD.rank == 0:
        rows = used(folder / "t.csv")
        assert len(rows) == 8
        assert {row["fusion_threshold_mb"] for row in rows} == {"64.0"}


@ranks(2)
def test_without_optuna_on_rank_0_every_rank_gets_the_same_clear_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if MPI.COMM_WORLD.rank == 0:
        monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(FusionError, match=r"pip install 'tensor-fusion-runtime\[tune\]'"):
        hvd.init(autotune="on")
    assert not hvd.is_initialized()
    hvd.init()  # And without tuning nobody misses it.
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2.0, 2.0]
    hvd.shutdown()


def corners(space: Space) -> list[Knobs]:
    """The smallest and the largest value of every key, in all combinations."""
    ends = [sorted({0, len(values) - 1}) for values in space.choices.values()]
    return [space.at(dict(zip(space.choices, point, strict=True))) for point in itertools.product(*ends)]


@ranks(2, 4)
@pytest.mark.parametrize("arrangement", ["one node", "pairs", "a node each"])
def test_every_setting_of_the_search_gives_the_same_bits_in_the_same_memory(arrangement: str) -> None:
    world = MPI.COMM_WORLD
    nodes: dict[int, list[int]] = {}
    for rank in range(world.size):
        nodes.setdefault(ARRANGEMENTS[arrangement](rank), []).append(rank)
    space = space_of(
        Config(fusion_threshold_mb=4.0, chunk_kb=1024, ring_segment_kb=60), (), list(nodes.values())
    )
    small = msgspec.structs.replace(space, choices={**space.choices, **_smaller(space)})
    plane = Plane(arrangement, small.start, small)
    before = _memory(plane)
    tensors = [draw(world.rank, 100_003, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    results = set()
    try:
        for knobs in corners(small):
            plane.executor.retune(knobs)
            sums = [plane.allreduce([tensor])[0] for tensor in tensors]
            assert_same_bits(*sums)
            results.add(digest(*sums))
            assert _memory(plane) == before
    finally:
        plane.close()
    assert len(results) == 1


def _smaller(space: Space) -> dict[str, tuple]:
    """Values at which these tensors need many chunks and segments, or one."""
    values = {"chunk_kb": (8, 1024), "ring_segment_kb": (1, 60)}
    return {key: values[key] for key in values if key in space.choices}


def _memory(plane: Plane) -> list[int]:
    """Where the buffers lie, and how large they are."""
    executor = plane.executor
    buffers = [node for node in (executor._means.node, executor._alone) if node is not None]
    places = [
        node.half(parity, rank, torch.uint8).data_ptr()
        for node in buffers
        for parity, rank in itertools.product((0, 1), range(node.size))
    ]
    return [executor.memory().buffers, executor._means.buffer_bytes, *places]
