"""How one optimizer compresses its gradients: the policy, what is remembered, and how many steps were made.

It outlives carriers, whose buckets come and go. Used on the thread that trains; ledgers that it
opened are used by the cycle thread while their bucket is in flight.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.messages import ReduceOp
from fusion import runtime
from fusion.compression.base import BucketInfo, Compressor
from fusion.compression.feedback import Feedback, Ledger, Memories
from fusion.compression.policy import Policy, policy_from
from fusion.torch.codec import method_of
from fusion.torch.compression import Compressor as CastCompressor
from fusion.torch.compression import NoneCompressor


class Compressing:
    """See the module.

    Attributes:
        steps: how many times gradients were reduced.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.steps = 0
        self.memories = Memories()

    @property
    def warm(self) -> bool:
        """Whether gradients travel uncompressed still."""
        return self.steps < self.policy.warmup_steps

    def open(self, info: BucketInfo, compressor: Compressor) -> Ledger:
        """The ledger of a bucket."""
        return self.memories.open(info, feedback=bool(getattr(compressor, "feedback", False)))

    def state_dict(self, rank: int, size: int) -> dict[str, Any]:
        """For a checkpoint of this rank: residuals are each rank's own."""
        return {"rank": rank, "size": size, "steps": self.steps, "tensors": self.memories.state_dict()}

    def load_state_dict(
        self, state: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], rank: int, size: int
    ) -> None:
        """Go on where the checkpoint was made.

        Residuals of another rank, or of a job of another size, are left out with a warning: all ranks
        that load what rank 0 saved would otherwise send rank 0's residual once each.

        Raises:
            ValueError: it is of other tensors; nothing has changed then.
        """
        self.memories.load_state_dict(state["tensors"], shapes)
        self.steps = int(state["steps"])
        if (state["rank"], state["size"]) != (rank, size):
            self.memories.forget_residuals()
            warnings.warn(
                f"the checkpoint has the compression residuals of rank {state['rank']} of {state['size']}, "
                f"and this is rank {rank} of {size}: they are left out. Save optimizer.state_dict() on "
                "every rank to keep them",
                stacklevel=4,
            )

    def forget(self) -> None:
        """Begin anew."""
        self.memories.reset()
        self.steps = 0


def compressing_of(compression: Any, op: ReduceOp) -> tuple[type[CastCompressor], Compressing | None]:
    """What an optimizer was asked for: a cast of Horovod's kind, or compression of buckets.

    Args:
        compression: as it was passed; None for the settings of the runtime.
        op: how gradients are combined.

    Raises:
        TypeError: it is no compression of any kind.
        ValueError: there is no such method, or it cannot be used with `op`.
    """
    policy = _policy(compression)
    if policy is None:
        if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
            raise TypeError(
                f"compression={compression!r} is none: pass a method of fusion.compression, a specification "
                "such as 'topk:0.01', a Policy, or one of hvd.Compression"
            )
        return compression, None
    if not policy.compresses:
        return NoneCompressor, None
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ValueError(
            f"compression by {policy.compressor.spec} needs op=Average or op=Sum, not {op.name.title()}"
        )
    return NoneCompressor, Compressing(policy)


def _policy(compression: Any) -> Policy | None:
    if compression is None:
        return policy_from(runtime.current().config)
    if isinstance(compression, Policy):
        return compression
    if isinstance(compression, Feedback):
        return Policy(compression.compressor)
    method = method_of(compression)
    return Policy(method) if isinstance(method, Compressor) else None
