"""How far NCCL reaches."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fusion.cuda.reach import Reach, Standing, choose_reach, version_text

NODE = ((0, 1),)
NODES = ((0, 1), (2, 3))


def ranks(
    gpus: Sequence[int], nccl: Sequence[int] | int = 22803, *, may_share: bool = False
) -> list[Standing]:
    versions = [nccl] * len(gpus) if isinstance(nccl, int) else nccl
    return [Standing(version, gpu, may_share) for version, gpu in zip(versions, gpus, strict=True)]


@pytest.mark.parametrize(("nodes", "gpus"), [(NODE, (7, 8)), (NODES, (7, 8, 7, 8))])
@pytest.mark.parametrize("wanted", ["auto", "nccl"])
def test_nccl_reaches_everywhere_where_every_rank_has_a_gpu_of_its_own(
    nodes: tuple[tuple[int, ...], ...], gpus: tuple[int, ...], wanted: str
) -> None:
    choice = choose_reach(ranks(gpus), nodes, wanted)
    assert choice.reach == Reach.ALL and choice.obstacle is None


def test_hierarchical_is_what_was_asked_for_between_nodes_and_all_of_nccl_on_one() -> None:
    assert choose_reach(ranks((7, 8, 7, 8)), NODES, "hierarchical").reach == Reach.NODE
    assert choose_reach(ranks((7, 8)), NODE, "hierarchical").reach == Reach.ALL


def test_ranks_that_share_a_gpu_are_named_and_go_through_the_host() -> None:
    choice = choose_reach(ranks((7, 8, 7, 7)), NODES, "auto")
    assert choice.reach == Reach.HOST and choice.obstacle is not None
    assert "ranks [2, 3] have the same GPU" in choice.obstacle and "set_device" in choice.obstacle


@pytest.mark.parametrize(("nccl", "reach"), [(22800, Reach.ALL), (22703, Reach.HOST)])
def test_a_gpu_is_shared_by_nccl_when_it_was_told_to_and_can(nccl: int, reach: Reach) -> None:
    assert choose_reach(ranks((7, 7), nccl, may_share=True), NODE, "auto").reach == reach


def test_a_rank_without_nccl_is_named() -> None:
    choice = choose_reach(ranks((7, 8), (22803, 0)), NODE, "auto")
    assert choice.reach == Reach.HOST and choice.obstacle is not None
    assert "ranks [1] have no NCCL" in choice.obstacle


def test_versions_that_differ_between_nodes_keep_nccl_inside_them() -> None:
    choice = choose_reach(ranks((7, 8, 7, 8), (22803, 22803, 23203, 23203)), NODES, "auto")
    assert choice.reach == Reach.NODE and choice.obstacle is not None
    assert "2.28.3, 2.32.3" in choice.obstacle


def test_versions_that_differ_inside_a_node_keep_nccl_away() -> None:
    assert choose_reach(ranks((7, 8), (22803, 23203)), NODE, "auto").reach == Reach.HOST


def test_the_host_is_never_refused() -> None:
    choice = choose_reach(ranks((7, 7), 0), NODE, "host")
    assert choice.reach == Reach.HOST and choice.obstacle is None


def test_a_version_reads_as_people_write_it() -> None:
    assert version_text(22803) == "2.28.3"
