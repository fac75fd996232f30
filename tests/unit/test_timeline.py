"""The trace file: valid at every instant, escaped, bounded, one file a rank."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator import json_array
from coordinator.executor import Entry
from coordinator.handle import Bell, Handle
from coordinator.json_array import PAGE, JsonArray
from coordinator.messages import OpKind, Part, Request, Response
from coordinator.recorder import Recorder
from coordinator.timeline import Timeline, timeline_path

Event = dict[str, Any]


def events(path: Path | str) -> list[Event]:
    loaded: list[Event] = json.loads(Path(path).read_text(encoding="ascii"))
    return loaded


def rows(trace: list[Event]) -> dict[int, str]:
    return {e["tid"]: e["args"]["name"] for e in trace if e["name"] == "thread_name"}


def spans(trace: list[Event]) -> list[Event]:
    return [e for e in trace if e["ph"] == "X"]


def test_a_trace_that_was_closed_parses(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "t.json", 3)
    timeline.span("pack", ["w"], 1.0, 1.5, 40)
    timeline.close()
    assert spans(events(tmp_path / "t.json")) == [
        {
            "ph": "X",
            "pid": 3,
            "tid": 1,
            "name": "pack",
            "ts": 1e6,
            "dur": 5e5,
            "args": {"bytes": 40, "tensors": 1},
        }
    ]


def test_each_tensor_has_a_row_with_its_name(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "t.json", 0)
    timeline.span("pack", ["a", "b"], 1.0, 1.5, 8)
    timeline.span("reduce", ["b", "a"], 1.5, 2.0, 8)
    timeline.close()
    trace = events(tmp_path / "t.json")
    assert sorted(rows(trace).values()) == ["a", "b", "cycles"]
    by_row = [(rows(trace)[e["tid"]], e["name"]) for e in spans(trace)]
    assert by_row == [("a", "pack"), ("b", "pack"), ("b", "reduce"), ("a", "reduce")]


def test_the_process_is_named_for_the_rank(tmp_path: Path) -> None:
    Timeline(tmp_path / "t.json", 5).close()
    assert events(tmp_path / "t.json")[0] == {
        "ph": "M",
        "pid": 5,
        "tid": 0,
        "name": "process_name",
        "args": {"name": "rank 5"},
    }


def test_a_cycle_says_how_many_idle_ones_came_before(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "t.json", 0)
    for ready in (0, 0, 4):
        timeline.cycle(1.0, 2.0, ready)
    timeline.close()
    assert [e["args"] for e in spans(events(tmp_path / "t.json"))] == [{"ready": 4, "idle_cycles_before": 2}]


@given(name=st.text(st.characters(codec=None)))
def test_any_name_is_escaped(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    path = tmp_path_factory.mktemp("names") / "t.json"
    timeline = Timeline(path, 0)
    timeline.span("pack", [name], 0.0, 1.0, 4)
    timeline.close()
    assert name in rows(events(path)).values()


def test_quotes_backslashes_and_newlines_are_escaped(tmp_path: Path) -> None:
    names = ['a"b', "a\\b", "a\nb", "größe 🎉", "]", ""]
    timeline = Timeline(tmp_path / "t.json", 0)
    timeline.span("pack", names, 0.0, 1.0, 4)
    timeline.close()
    assert sorted(rows(events(tmp_path / "t.json")).values()) == sorted([*names, "cycles"])


def test_a_name_too_long_for_a_record_is_cut(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "t.json", 0)
    timeline.span("pack", ["🎉" * 10_000], 0.0, 1.0, 4)
    timeline.close()
    (label,) = set(rows(events(tmp_path / "t.json")).values()) - {"cycles"}
    assert label.startswith("🎉") and label.endswith("...")


def test_the_file_parses_after_every_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_array, "FIRST_BYTES", 2 * PAGE)
    timeline = Timeline(tmp_path / "t.json", 0)
    for count in range(1, 200):
        timeline.span("reduce", [f"layer.{count}.weight"], 1.0, 2.0, count)
        assert [e["args"]["bytes"] for e in spans(events(tmp_path / "t.json"))] == list(range(1, count + 1))
    timeline.close()


@given(lengths=st.lists(st.integers(0, PAGE - 16), max_size=40))
def test_every_write_stays_inside_a_page_and_leaves_valid_json(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int]
) -> None:
    path = tmp_path_factory.mktemp("writes") / "t.json"
    real = os.pwrite

    def checked(fd: int, data: bytes, at: int) -> int:
        assert at // PAGE == (at + len(data) - 1) // PAGE
        written = real(fd, data, at)
        json.loads(path.read_text())
        return written

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_array, "FIRST_BYTES", PAGE)
        patch.setattr(os, "pwrite", checked)
        array = JsonArray(str(path), '"first"', 1 << 30)
        records = [json.dumps("x" * length) for length in lengths]
        assert array.append(records[:5])
        assert array.append(records[5:])
        array.close()
    assert json.loads(path.read_text()) == ["first", *("x" * length for length in lengths)]


def test_a_killed_process_leaves_a_trace_that_parses(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    program = (
        "import itertools, sys\n"
        "from coordinator.timeline import Timeline\n"
        f"timeline = Timeline({str(path)!r}, 0)\n"
        "for count in itertools.count():\n"
        "    timeline.span('reduce', [f'{i}.weight' for i in range(count % 90)], 1.0, 2.0, count)\n"
        "    if count == 200: print('running', flush=True)\n"
    )
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
        assert spans(events(path))[-1]["args"]["bytes"] >= 200


def test_a_full_trace_stops_inside_its_bound_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "t.json"
    timeline = Timeline(path, 0, max_mb=0.05)
    with caplog.at_level(logging.WARNING, "fusion"):
        for count in range(2000):
            timeline.span("reduce", ["w"], 1.0, 2.0, count)
    assert timeline.closed
    assert path.stat().st_size <= 0.05 * 2**20
    assert "timeline_max_mb" in events(path)[-1]["name"]
    assert [record.message for record in caplog.records] == [
        f"the timeline '{path}' is full at 0.05 MB and has stopped; raise timeline_max_mb"
    ]


def test_a_full_trace_keeps_the_events_before_it_stopped(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "t.json", 0, max_mb=0.05)
    for count in range(2000):
        timeline.span("reduce", ["w"], 1.0, 2.0, count)
    seen = [e["args"]["bytes"] for e in spans(events(tmp_path / "t.json"))]
    assert len(seen) > 200 and seen == list(range(len(seen)))


def test_a_closed_trace_has_no_padding(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "t.json", 0)
    timeline.close()
    assert (tmp_path / "t.json").stat().st_size < 400


def test_closing_leaves_no_other_file_behind(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "t.json", 0)
    timeline.span("pack", ["a"], 0.0, 1.0, 1)
    timeline.close()
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


def test_a_missing_folder_is_made(tmp_path: Path) -> None:
    Timeline(tmp_path / "traces" / "run" / "t.json", 0).close()
    assert events(tmp_path / "traces" / "run" / "t.json")


def test_a_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'/dev/null' is not a regular file"):
        Timeline("/dev/null", 0)


def test_a_disk_that_fails_ends_the_trace_and_not_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    timeline = Timeline(tmp_path / "t.json", 0)
    timeline.span("pack", ["a"], 0.0, 1.0, 1)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "fusion"):
        patch.setattr(os, "pwrite", full)
        timeline.span("reduce", ["a"], 1.0, 2.0, 1)
    timeline.span("unpack", ["a"], 2.0, 3.0, 1)
    timeline.close()
    assert [e["name"] for e in spans(events(tmp_path / "t.json"))] == ["pack"]
    assert "No space left on device" in caplog.text


@pytest.mark.parametrize(
    ("path", "rank", "mine"),
    [
        ("t.json", 0, "t.json"),
        ("t.json", 1, None),
        ("t.{rank}.json", 0, "t.0.json"),
        ("t.{rank}.json", 12, "t.12.json"),
    ],
)
def test_ranks_never_share_a_file(path: str, rank: int, mine: str | None) -> None:
    assert timeline_path(path, rank) == mine


def test_a_rank_without_a_file_records_its_totals_all_the_same(tmp_path: Path) -> None:
    recorder = Recorder(1, timeline=str(tmp_path / "t.json"))
    recorder.span("pack", ["a"], 0.0, 1.0, 4)
    recorder.close()
    assert recorder.stats().pack_s == 1.0
    assert list(tmp_path.iterdir()) == []


def test_a_trace_can_be_stopped_and_another_started(tmp_path: Path) -> None:
    recorder = Recorder()
    for name in ("one", "two"):
        recorder.start_timeline(str(tmp_path / f"{name}.json"))
        recorder.span("pack", [name], 0.0, 1.0, 4)
        recorder.stop_timeline()
        recorder.span("pack", ["between"], 1.0, 2.0, 4)
    assert set(rows(events(tmp_path / "one.json")).values()) == {"cycles", "one"}
    assert set(rows(events(tmp_path / "two.json")).values()) == {"cycles", "two"}


def test_starting_again_ends_the_trace_before(tmp_path: Path) -> None:
    recorder = Recorder(timeline=str(tmp_path / "one.json"))
    recorder.start_timeline(str(tmp_path / "two.json"))
    recorder.span("pack", ["a"], 0.0, 1.0, 4)
    recorder.close()
    assert spans(events(tmp_path / "one.json")) == []
    assert len(spans(events(tmp_path / "two.json"))) == 1


def test_stopping_without_a_trace_is_allowed() -> None:
    Recorder().stop_timeline()


def test_the_life_of_a_tensor_is_on_its_row(tmp_path: Path) -> None:
    recorder = Recorder(timeline=str(tmp_path / "t.json"))
    wanted = Request("w", OpKind.ALLREDUCE, ("float32",), ((6,),))
    recorder.cycle(2.0, 3.0, 1)
    response = Response(OpKind.ALLREDUCE, "float32", (Part(wanted, 0),))
    recorder.queued(response, [Entry(wanted, [], [], Handle("w", Bell()), enqueued_at=1.0)], 3.0)
    for at, phase in enumerate(("pack", "reduce", "unpack"), start=3):
        recorder.span(phase, ["w"], at, at + 1.0, 24)
    recorder.close()
    trace = events(tmp_path / "t.json")
    life = [
        (e["name"], e["ts"] / 1e6, e["dur"] / 1e6, e["args"]["bytes"]) for e in spans(trace) if e["tid"] == 1
    ]
    assert life == [
        ("queued", 1.0, 1.0, 24),
        ("negotiate", 2.0, 1.0, 24),
        ("pack", 3.0, 1.0, 24),
        ("reduce", 4.0, 1.0, 24),
        ("unpack", 5.0, 1.0, 24),
    ]
