"""The distributed optimizer, where Horovod has it."""

import functools
from typing import Any

import fusion.torch
from fusion.torch.optimizer import _Distributed as _DistributedOptimizer
from fusion.torch.optimizer import _DistributedAdasum as _DistributedAdasumOptimizer

__all__ = ["DistributedOptimizer", "_DistributedAdasumOptimizer", "_DistributedOptimizer"]


@functools.wraps(fusion.torch.DistributedOptimizer)
def DistributedOptimizer(*args: Any, **kwargs: Any) -> Any:  # noqa: N802 - the name is Horovod's
    """`fusion.torch.DistributedOptimizer`; libraries find Horovod's name in the wrapper's class."""
    wrapper = fusion.torch.DistributedOptimizer(*args, **kwargs)
    type(wrapper).__module__ = __name__
    return wrapper
