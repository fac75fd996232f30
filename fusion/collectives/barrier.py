"""Barrier: returns when every rank has come to it.

Inside one node a counter in shared memory for each rank; over several nodes
MPI's own, ceil(log2 p) rounds of empty messages, polled.
"""

from __future__ import annotations

from fusion.collectives.job import Job, Means


class Barrier:
    """See the module."""

    def __init__(self, means: Means) -> None:
        self._means = means

    def __call__(self, job: Job) -> None:
        with self._means.phase("reduce", (job.name,), 0):
            if len(self._means.topology.nodes) == 1:
                self._means.node.barrier()
            else:
                self._means.world.barrier()
