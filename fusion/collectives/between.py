"""The all-reduce between nodes: recursive doubling for what is short, the ring for the rest.

Called on the cycle thread by the collectives that combine a node's ranks first.
Which of the two runs is a function of the length alone, which all ranks share.
"""

from __future__ import annotations

import torch

from fusion.arithmetic import Arithmetic
from fusion.channel import Channel
from fusion.collectives import chooser
from fusion.collectives.doubling import Doubling
from fusion.collectives.pipeline import Crossing
from fusion.collectives.ring import Ring


class Between:
    """All-reduces over one communicator.

    Args:
        channel: the ranks, one of each node.
        segment_bytes: most bytes of a message of the ring.
    """

    def __init__(self, channel: Channel, segment_bytes: int) -> None:
        self._ring = Ring(channel, segment_bytes)
        self._doubling = Doubling(channel)
        self.size = channel.size

    def all_reduce(self, partial: torch.Tensor, out: torch.Tensor, arithmetic: Arithmetic) -> None:
        """Reduce `partial` of all ranks to `out` on all; they are the same tensor unless widened."""
        self._way(partial).all_reduce(partial, out, arithmetic)

    def begin_all_reduce(
        self, partial: torch.Tensor, out: torch.Tensor, arithmetic: Arithmetic, lane: int
    ) -> Crossing:
        """Begin what `all_reduce` does. The tensors must stay until it is complete.

        Args:
            lane: tells what is under way at the same time apart, on all ranks alike.
        """
        return self._way(partial).begin_all_reduce(partial, out, arithmetic, lane)

    def _way(self, partial: torch.Tensor) -> Doubling | Ring:
        return self._doubling if chooser.is_short(partial.nbytes) else self._ring
