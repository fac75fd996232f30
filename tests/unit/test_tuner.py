"""The tuner on a made-up job whose steps cost what the settings say: no thread, no clock."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from coordinator.messages import OpKind, Part, Region, Request, Response
from coordinator.planner import fuse
from coordinator.tuning import Knobs, Tuning
from fusion.config import Config, load
from fusion.tuning.space import KEYS, Space, space_of
from fusion.tuning.tuner import OnlineTuner, check, prepare

TWO_NODES = [(0, 1), (2, 3)]


class Job:
    """Steps of 20 tensors of 64 KiB, one after the other.

    Attributes:
        knobs: the settings in use.
        used: all that were in use.
    """

    def __init__(self, tuner: OnlineTuner, space: Space, cost: Callable[[Knobs], float]) -> None:
        self.tuner, self.cost = tuner, cost
        self.now = 100.0
        self.knobs = space.start
        self.used = [space.start]
        self.requests = [
            Request(f"t{number}", OpKind.ALLREDUCE, ("float32",), ((1 << 14,),)) for number in range(20)
        ]

    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self.tuner.finished:
                return
            responses = fuse(self.requests, self.knobs.fusion_threshold)
            seconds = self.cost(self.knobs)
            for number, response in enumerate(responses):
                self.cycle([response], self.now + number * seconds / len(responses))
            self.now += seconds

    def cycle(self, responses: list[Response], at: float) -> None:
        self.tuner.ran(responses, at)
        if self.tuner.wanted is not None:
            self.knobs = self.tuner.wanted
            self.used.append(self.knobs)
            self.tuner.applied()


def cost(knobs: Knobs) -> float:
    """Best at 8 MiB, 0.5 ms, segments of 120 KiB; chunks make no difference."""
    return (
        0.050
        + 0.004 * abs(knobs.fusion_threshold_mb - 8.0) ** 0.5
        + 0.003 * abs(knobs.cycle_time_ms - 0.5)
        + 0.00002 * abs(knobs.ring_segment_kb - 120)
    )


def make(tmp_path: Path, **settings: object) -> tuple[OnlineTuner, Space, Path]:
    path = tmp_path / "tuned.yaml"
    loaded = load(settings, environ={}, autotune="on", autotune_file=path, autotune_log=tmp_path / "log.csv")
    chosen = {
        "chunk_kb": loaded.config.chunk_kb or 1024,
        "ring_segment_kb": loaded.config.ring_segment_kb or 60,
    }
    config = msgspec.structs.replace(loaded.config, **chosen)
    space = space_of(config, loaded.pinned, TWO_NODES)
    return OnlineTuner(space, config, loaded.pinned), space, path


def test_it_finds_better_settings_ends_with_them_and_writes_them(tmp_path: Path) -> None:
    tuner, space, path = make(tmp_path)
    job = Job(tuner, space, cost)
    job.run(1000)
    assert tuner.finished
    tuner.close()
    loaded = load(path, environ={})
    assert {key: getattr(job.knobs, key) for key in space.choices} == {
        key: getattr(loaded.config, key) for key in loaded.pinned
    }
    assert cost(job.knobs) <= 1.05 * 0.050
    assert job.knobs.chunk_kb == space.start.chunk_kb
    assert "complete" not in path.read_text()
    assert path.read_text().startswith("# Tuned in ")


def test_the_log_has_a_line_for_every_sample(tmp_path: Path) -> None:
    tuner, space, _ = make(tmp_path)
    Job(tuner, space, cost).run(1000)
    tuner.close()
    rows = list(csv.DictReader((tmp_path / "log.csv").open()))
    assert [int(row["sample"]) for row in rows] == list(range(1, len(rows) + 1))
    assert len(rows) <= 40
    for row in rows:
        knobs = Knobs(**{key: type(getattr(space.start, key))(row[key]) for key in KEYS})
        assert float(row["step_ms"]) == pytest.approx(1e3 * cost(knobs), rel=1e-3)


def test_keys_that_the_user_gave_never_change_and_are_written_too(tmp_path: Path) -> None:
    tuner, space, path = make(tmp_path, cycle_time_ms=1.0, ring_segment_kb=60, buckets="static")
    job = Job(tuner, space, cost)
    job.run(1000)
    tuner.close()
    assert {(knobs.cycle_time_ms, knobs.ring_segment_kb) for knobs in job.used} == {(1.0, 60)}
    assert len({knobs.fusion_threshold_mb for knobs in job.used}) > 1
    config = load(path, environ={}).config
    assert (config.cycle_time_ms, config.ring_segment_kb, config.buckets) == (1.0, 60, "static")
    assert config.autotune == "off"


def test_a_program_that_ends_early_leaves_the_best_so_far(tmp_path: Path) -> None:
    tuner, space, path = make(tmp_path)
    job = Job(tuner, space, cost)
    job.run(60)
    assert not tuner.finished
    tuner.close()
    text = path.read_text()
    assert "the program ended before the search did" in text
    config = load(path, environ={}).config
    assert cost(Knobs(**{key: getattr(config, key) for key in KEYS})) <= cost(space.start)


def test_a_program_without_steps_is_told_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tuner, _, path = make(tmp_path)
    for number in range(100):
        request = Request(f"allreduce.noname.{number}", OpKind.ALLREDUCE, ("float32",), ((4,),))
        tuner.ran(fuse([request], 0), float(number))
    tuner.close()
    assert tuner.wanted is None
    assert "no training step was seen to repeat" in caplog.text
    assert not path.exists()


def test_steps_that_do_other_work_are_not_measured(tmp_path: Path) -> None:
    tuner, space, _ = make(tmp_path)
    job = Job(tuner, space, cost)
    extra = Request("metric", OpKind.ALLREDUCE, ("float32",), ((1,),))
    for _ in range(200):
        job.run(3)
        job.requests.append(extra)  # Every fourth step is another one, and slow.
        job.cost = lambda _: 7.0
        job.run(1)
        job.requests.pop()
        job.cost = cost
    assert tuner.finished
    tuner.close()
    rows = list(csv.DictReader((tmp_path / "log.csv").open()))
    assert max(float(row["step_ms"]) for row in rows) < 1000


def test_when_the_steps_change_the_search_begins_anew(tmp_path: Path) -> None:
    tuner, space, _ = make(tmp_path)
    job = Job(tuner, space, cost)
    job.run(100)
    job.requests = job.requests[:10]
    job.cost = lambda knobs: 0.05 + 0.01 * abs(knobs.fusion_threshold_mb - 1.0)
    job.run(1000)
    assert tuner.finished
    assert job.knobs.fusion_threshold_mb == 1.0


def test_static_buckets_leave_the_threshold_alone(tmp_path: Path) -> None:
    tuner, space, path = make(tmp_path)
    job = Job(tuner, space, cost)
    job.requests = [
        Request(f"b{n}", OpKind.ALLREDUCE, ("float32",), ((1 << 14,),), region=Region(0, n << 16))
        for n in range(4)
    ]
    job.run(1000)
    tuner.close()
    assert {knobs.fusion_threshold_mb for knobs in job.used} == {64.0}
    assert "fusion_threshold_mb" not in load(path, environ={}).pinned
    assert "static buckets keep the layout" in path.read_text()


def test_where_everything_was_set_there_is_no_tuner(caplog: pytest.LogCaptureFixture) -> None:
    loaded = load({key: getattr(Config(), key) for key in KEYS}, environ={}, autotune="on")
    prepared = prepare(loaded.config, loaded.pinned, TWO_NODES, rank=0)
    assert prepared.tuner is None
    assert "nothing is tuned" in caplog.text


def test_only_rank_0_has_a_tuner_and_all_have_the_same_room() -> None:
    config = Config(autotune="on")
    mine, theirs = (prepare(config, (), TWO_NODES, rank) for rank in (0, 1))
    assert mine.tuner is not None
    assert theirs.tuner is None
    assert mine.space == theirs.space


def test_files_that_cannot_be_written_are_refused_at_the_start(tmp_path: Path) -> None:
    assert check(Config(autotune="on", autotune_file=str(tmp_path / "t.yaml"))) is None
    for bad in (tmp_path, tmp_path / "gone" / "t.yaml"):
        assert "autotune_file" in str(check(Config(autotune="on", autotune_file=str(bad))))
    assert check(Config(autotune="off", autotune_file=str(tmp_path))) is None


def test_a_result_that_cannot_be_written_harms_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tuner, space, path = make(tmp_path)
    tuning = Tuning(lambda _: None, tuner)
    Job(tuner, space, cost).run(100)
    path.mkdir()
    tuning.close()
    assert "could not be kept" in caplog.text
    assert tuning.wanted is None


def test_barriers_are_no_traffic(tmp_path: Path) -> None:
    tuner, _, _ = make(tmp_path)
    barrier = Request("barrier", OpKind.BARRIER, ("int64",), ((),))
    for number in range(50):
        tuner.ran([Response(OpKind.BARRIER, "int64", (Part(barrier, 0),))], float(number))
    assert tuner.wanted is None
