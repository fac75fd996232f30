"""How far NCCL reaches: a pure decision from what every rank says about itself.

Each rank calls `choose_reach` with the same standings, so all decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import msgspec

SHARING = 22800
"""The first NCCL that several ranks may use with one GPU, if NCCL_MULTI_RANK_GPU_ENABLE=1 is set."""


class Reach(Enum):
    """What connects the devices of a process set."""

    ALL = "nccl"
    """NCCL connects all ranks."""
    NODE = "hierarchical"
    """NCCL connects the ranks of a node, MPI the nodes."""
    HOST = "host"
    """Everything goes through host memory."""


class Standing(msgspec.Struct, frozen=True):
    """What a rank says about itself."""

    nccl: int
    """Version, 0 for none."""
    gpu: int
    """The same for ranks of a node exactly when they have the same GPU."""
    may_share: bool
    """NCCL was told that ranks may share a GPU."""


class Choice(msgspec.Struct, frozen=True):
    """The decision, and what stood in the way of reaching further."""

    reach: Reach
    obstacle: str | None = None


def choose_reach(standings: Sequence[Standing], nodes: Sequence[Sequence[int]], wanted: str) -> Choice:
    """Decide how far NCCL reaches.

    Args:
        standings: of each rank.
        nodes: the ranks of each node.
        wanted: the setting `gpu`; what was asked for by name and cannot be had comes back
            with an obstacle, for the caller to refuse.
    """
    if wanted == "host":
        return Choice(Reach.HOST)
    for ranks in nodes:
        obstacle = _obstacle(standings, ranks)
        if obstacle is not None:
            return Choice(Reach.HOST, obstacle)
    versions = {standing.nccl for standing in standings}
    if len(versions) > 1:
        found = ", ".join(map(version_text, sorted(versions)))
        obstacle = f"the nodes have different versions of NCCL ({found}): install the same on all"
        return Choice(Reach.NODE, obstacle)
    if wanted == "hierarchical" and len(nodes) > 1:
        return Choice(Reach.NODE)
    return Choice(Reach.ALL)


def version_text(version: int) -> str:
    """NCCL's number of a version as people write it: 22803 is 2.28.3."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _obstacle(standings: Sequence[Standing], ranks: Sequence[int]) -> str | None:
    """Why NCCL cannot even connect the ranks of a node."""
    without = [rank for rank in ranks if not standings[rank].nccl]
    if without:
        return f"ranks {without} have no NCCL: pip install nvidia-nccl-cu12, or that of their CUDA version"
    if len({standings[rank].nccl for rank in ranks}) > 1:
        found = ", ".join(f"rank {rank} has {version_text(standings[rank].nccl)}" for rank in ranks)
        return f"ranks of one node have different versions of NCCL: {found}"
    by_gpu: dict[int, list[int]] = {}
    for rank in ranks:
        by_gpu.setdefault(standings[rank].gpu, []).append(rank)
    for sharing in by_gpu.values():
        able = all(standings[rank].may_share and standings[rank].nccl >= SHARING for rank in sharing)
        if len(sharing) > 1 and not able:
            return (
                f"ranks {sharing} have the same GPU, which NCCL refuses: call "
                "torch.cuda.set_device(hvd.local_rank()) first, or, to share a GPU on purpose, set "
                f"NCCL_MULTI_RANK_GPU_ENABLE=1 with NCCL {version_text(SHARING)} or later"
            )
    return None
