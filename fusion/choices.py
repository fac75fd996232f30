"""What the settings leave to the runtime: chosen once, by all ranks together, when it starts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from fusion import mpi_settings
from fusion.config import Config

if TYPE_CHECKING:
    from mpi4py import MPI

CHUNK_KB = 1024
"""Stays in a core's cache from packing to unpacking."""
CROWDED_CHUNK_KB = 2048
"""Where ranks share cores, each hand-over between them may cost a turn of the scheduler."""


def choose_settings(comm: MPI.Intracomm, config: Config) -> Config:
    """Put values in place of those that are 0, for "as the runtime thinks best". Collective."""
    crowded, segment_kb = comm.allreduce((_crowded(comm), -_segment_kb()), op=_greatest)
    return msgspec.structs.replace(
        config,
        chunk_kb=config.chunk_kb or (CROWDED_CHUNK_KB if crowded else CHUNK_KB),
        ring_segment_kb=config.ring_segment_kb or -segment_kb,
    )


def _crowded(comm: MPI.Intracomm) -> bool:
    """Whether this node has more ranks than cores for them."""
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        return bool(node.size > len(os.sched_getaffinity(0)))
    finally:
        node.Free()


def _segment_kb() -> int:
    from mpi4py import MPI

    return mpi_settings.segment_kb(os.environ, open_mpi=MPI.get_vendor()[0] == "Open MPI")


def _greatest(a: tuple[bool, int], b: tuple[bool, int]) -> tuple[bool, int]:
    return max(a[0], b[0]), max(a[1], b[1])
