"""The recorder's totals."""

from __future__ import annotations

import msgspec
import pytest

from coordinator.executor import Entry
from coordinator.handle import Bell, Handle
from coordinator.messages import OpKind, Part, Request, Response
from coordinator.recorder import Recorder
from coordinator.stats import Stats


def request(
    name: str, *shapes: tuple[int, ...], kind: OpKind = OpKind.ALLREDUCE, dtype: str = "float32"
) -> Request:
    return Request(name=name, kind=kind, dtypes=(dtype,) * len(shapes), shapes=shapes)


def response(*requests: Request) -> Response:
    parts = tuple(Part(each, index) for each in requests for index in range(len(each.shapes)))
    return Response(parts[0].request.kind, parts[0].dtype, parts)


def entry(wanted: Request, at: float) -> Entry:
    return Entry(wanted, [], [], Handle(wanted.name, Bell()), enqueued_at=at)


def test_nothing_has_happened_at_first() -> None:
    assert Recorder().stats() == Stats()


def test_a_fused_buffer_counts_its_tensors_and_bytes() -> None:
    recorder = Recorder()
    recorder.response(response(request("a", (2, 3)), request("b", (5,))))
    stats = recorder.stats()
    assert (stats.responses, stats.tensors, stats.bytes) == (1, 2, 44)
    assert (stats.buffers, stats.reduced_tensors, stats.reduced_bytes) == (1, 2, 44)


def test_the_mean_is_over_buffers() -> None:
    recorder = Recorder()
    recorder.response(response(request("a", (1,)), request("b", (1,)), request("c", (1,))))
    recorder.response(response(request("d", (1,))))
    assert recorder.stats().mean_tensors_per_buffer == 2.0


def test_the_mean_without_a_buffer_is_zero() -> None:
    assert Stats().mean_tensors_per_buffer == 0.0


def test_other_collectives_move_tensors_but_fill_no_buffer() -> None:
    recorder = Recorder()
    recorder.response(response(request("a", (4,), kind=OpKind.BROADCAST)))
    stats = recorder.stats()
    assert (stats.tensors, stats.bytes) == (1, 16)
    assert (stats.buffers, stats.reduced_tensors, stats.reduced_bytes) == (0, 0, 0)


@pytest.mark.parametrize("kind", [OpKind.BARRIER, OpKind.ARENA])
def test_what_has_no_tensors_counts_as_a_response_only(kind: OpKind) -> None:
    recorder = Recorder()
    recorder.response(response(request("x", (8,), kind=kind)))
    stats = recorder.stats()
    assert (stats.responses, stats.tensors, stats.bytes) == (1, 0, 0)


def test_seconds_add_up_by_phase() -> None:
    recorder = Recorder()
    recorder.span("pack", ["a"], 1.0, 1.5, 4)
    recorder.span("pack", ["b"], 2.0, 2.25, 4)
    recorder.span("reduce", ["a"], 3.0, 4.0, 4)
    recorder.span("unpack", ["a"], 4.0, 6.0, 4)
    stats = recorder.stats()
    assert (stats.pack_s, stats.reduce_s, stats.unpack_s) == (0.75, 1.0, 2.0)


def test_idle_rounds_are_counted_but_take_no_negotiation_time() -> None:
    recorder = Recorder()
    recorder.cycle(0.0, 5.0, 0)
    recorder.cycle(5.0, 5.5, 3)
    stats = recorder.stats()
    assert (stats.cycles, stats.negotiate_s) == (2, 0.5)


def test_an_entry_is_queued_until_the_round_that_agreed_it_began() -> None:
    recorder = Recorder()
    recorder.cycle(3.0, 3.5, 2)
    both = [entry(request("a", (1,)), 1.0), entry(request("b", (1,)), 2.5)]
    recorder.queued(response(*(each.request for each in both)), both, 3.5)
    assert recorder.stats().queued_s == 2.5


def test_a_group_is_queued_once_however_many_tensors_it_has() -> None:
    recorder = Recorder()
    group = entry(request("g", (1,), (1,), (1,)), 1.0)
    recorder.cycle(3.0, 3.5, 1)
    recorder.queued(response(group.request), [group, group], 3.5)
    group.executed = 2
    recorder.queued(response(group.request), [group], 3.5)
    assert recorder.stats().queued_s == 2.0


def test_a_difference_of_snapshots_is_what_happened_between_them() -> None:
    recorder = Recorder()
    recorder.response(response(request("a", (1,))))
    before = recorder.stats()
    recorder.response(response(request("b", (2,)), request("c", (3,))))
    recorder.span("pack", ["b"], 0.0, 0.5, 4)
    assert recorder.stats().since(before) == Stats(
        responses=1, tensors=2, bytes=20, buffers=1, reduced_tensors=2, reduced_bytes=20, pack_s=0.5
    )


def test_a_snapshot_does_not_change_afterwards() -> None:
    recorder = Recorder()
    before = recorder.stats()
    recorder.cycle(0.0, 1.0, 1)
    assert before.cycles == 0
    with pytest.raises(AttributeError):
        before.cycles = 1  # type: ignore[misc]


def test_a_snapshot_can_be_sent_as_json() -> None:
    stats = Recorder().stats()
    assert msgspec.json.decode(msgspec.json.encode(stats), type=Stats) == stats
