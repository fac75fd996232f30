"""Which settings may be tried: none that the user gave, and none on which the bits of a sum depend."""

from __future__ import annotations

import pytest

from fusion.config import Config, load
from fusion.tuning.space import KEYS, space_of

ONE_NODE = [(0, 1, 2, 3)]
TWO_NODES = [(0, 1), (2, 3)]
THREE_NODES = [(0, 1), (2, 3), (4, 5)]


@pytest.mark.parametrize(
    ("nodes", "hierarchy", "tried"),
    [
        ([(0,)], "auto", {"fusion_threshold_mb", "cycle_time_ms"}),
        ([(0, 1)], "auto", {"fusion_threshold_mb", "cycle_time_ms", "chunk_kb", "hierarchy"}),
        (ONE_NODE, "auto", {"fusion_threshold_mb", "cycle_time_ms", "chunk_kb"}),
        ([(0,), (1,)], "auto", {"fusion_threshold_mb", "cycle_time_ms", "ring_segment_kb"}),
        (TWO_NODES, "auto", {"fusion_threshold_mb", "cycle_time_ms", "chunk_kb", "ring_segment_kb"}),
        (TWO_NODES, "off", {"ring_segment_kb"}),
        (THREE_NODES, "on", {"ring_segment_kb"}),
        (ONE_NODE, "off", {"ring_segment_kb"}),
    ],
)
def test_only_what_changes_no_sum_is_tried(nodes: list, hierarchy: str, tried: set) -> None:
    space = space_of(Config(hierarchy=hierarchy), (), nodes)
    assert set(space.choices) == tried
    assert set(space.left_alone) == set(KEYS) - tried


def test_what_the_user_gave_is_left_alone_wherever_it_was_given() -> None:
    loaded = load(
        {"chunk_kb": 1024}, environ={"HOROVOD_FUSION_THRESHOLD": "1048576"}, cycle_time_ms=1.0, autotune="on"
    )
    space = space_of(loaded.config, loaded.pinned, TWO_NODES)
    assert set(space.choices) == {"ring_segment_kb"}
    assert space.left_alone["chunk_kb"] == "it was set"
    assert space.start.fusion_threshold_mb == 1.0


def test_with_autotune_alone_nothing_is_left_alone_because_it_was_set() -> None:
    loaded = load(environ={"HOROVOD_AUTOTUNE": "1"})
    assert loaded.config.autotune == "on"
    assert "it was set" not in space_of(loaded.config, loaded.pinned, TWO_NODES).left_alone.values()


def test_the_start_is_among_what_is_tried_even_where_it_is_unusual() -> None:
    space = space_of(Config(fusion_threshold_mb=100.0, chunk_kb=777), (), ONE_NODE)
    assert space.at(space.places(space.start)) == space.start
    assert space.fusion_threshold_mb == 100.0
    assert 777 in space.chunks_kb
    assert list(space.chunks_kb) == sorted(space.chunks_kb)


def test_values_tried_are_values_that_the_configuration_takes() -> None:
    space = space_of(Config(), (), [(0, 1)])
    for key, values in {**space.choices, **space_of(Config(), (), TWO_NODES).choices}.items():
        for value in values:
            assert load({key: value}, environ={}).config.to_dict()[key] == value


def test_a_key_can_be_left_alone_later() -> None:
    space = space_of(Config(), (), ONE_NODE).without("chunk_kb", "of the weather")
    assert "chunk_kb" not in space.choices
    assert space.left_alone["chunk_kb"] == "of the weather"
    assert space.chunks_kb == (space.start.chunk_kb,)
