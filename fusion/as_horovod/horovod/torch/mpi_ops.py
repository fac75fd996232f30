"""Operations and queries, where Horovod has them."""

from fusion.torch import *  # noqa: F403
from horovod.common.basics import HorovodBasics

_basics = HorovodBasics()
"""Used by Horovod's own tests and by some libraries."""
