"""What this runtime asks of an MPI before it starts, and what it can then count on.

Open MPI reads variables of the environment when it starts. None is changed that is set.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

WANTED = {
    # Ranks that wait must not starve ranks that compute.
    "mpi_yield_when_idle": "1",
    # Over TCP, a longer message waits until the receiver has been asked, and its parts then travel among
    # those of all others. A part of the cost of a message is the same for all lengths.
    "btl_tcp_eager_limit": "131072",
    "btl_tcp_rndv_eager_limit": "131072",
    "btl_tcp_max_send_size": "131072",
}
"""Parameters of Open MPI, by name."""

LONGEST_SEGMENT_KB = 120
"""Beyond this, fewer messages save nothing more, and a ring is less even."""

OTHERS_SEGMENT_KB = 60
"""MPICH over TCP takes ten times as long for messages of 120 KiB, many of which are under way."""

_PREFIX = "OMPI_MCA_"
_DEFAULT_EAGER_BYTES = 65536
_HEADER_BYTES = 4096
"""More than any header of a message."""


def ask() -> None:
    """Set what is wanted and not set; of use before MPI starts only."""
    for name, value in wanted(os.environ).items():
        os.environ[_PREFIX + name] = value


def wanted(environ: Mapping[str, str]) -> dict[str, str]:
    """What is wanted and not set in an environment."""
    return {name: value for name, value in WANTED.items() if _PREFIX + name not in environ}


def segment_kb(environ: Mapping[str, str], *, open_mpi: bool) -> int:
    """KiB of the longest segment that MPI sends without asking the receiver first.

    Args:
        environ: of this process when MPI started.
    """
    if not open_mpi:
        return OTHERS_SEGMENT_KB
    try:
        eager = int(environ.get(_PREFIX + "btl_tcp_eager_limit", _DEFAULT_EAGER_BYTES))
    except ValueError:
        eager = _DEFAULT_EAGER_BYTES
    return max(1, min((eager - _HEADER_BYTES) // 1024, LONGEST_SEGMENT_KB))
