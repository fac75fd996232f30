"""Operations and queries, where Horovod has them."""

from fusion.torch import *  # noqa: F403
from horovod.common.basics import HorovodBasics
from horovod.common.util import gpu_available, num_rank_is_power_2  # noqa: F401

_basics = HorovodBasics()
"""Used by Horovod's own tests and by some libraries."""
