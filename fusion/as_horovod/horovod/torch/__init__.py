"""`import horovod.torch as hvd`: the face `fusion.torch`."""

from fusion.torch import *  # noqa: F403
from horovod.common.util import check_extension as check_extension
from horovod.torch import compression as compression
from horovod.torch import functions as functions
from horovod.torch import mpi_ops as mpi_ops
from horovod.torch import optimizer as optimizer
from horovod.torch import sync_batch_norm as sync_batch_norm

# In place of the face's:
broadcast_optimizer_state = functions.broadcast_optimizer_state
DistributedOptimizer = optimizer.DistributedOptimizer
