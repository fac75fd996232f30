"""Where this rank stands: which ranks share its node, and who its counterparts on other nodes are.

Built once by `fusion.runtime.init` on the thread that calls it; read from any
thread afterwards. It duplicates the communicator it is given, so nothing the
program sends can be mistaken for ours, and it never initializes or finalizes MPI.

Testing aid: `FUSION_TEST_NODES="1,3"` makes one machine look like a node of one
rank and a node of three, in rank order, so that the paths between nodes run
without a second machine. It counts ranks of MPI_COMM_WORLD, in which every rank of
the job must be set alike.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from mpi4py import MPI

from coordinator.errors import ConfigError

TEST_NODES = "FUSION_TEST_NODES"


class Topology:
    """Ranks, nodes, and one communicator for each way data moves.

    Ranks of a node keep the order they have in the world, and nodes are numbered
    by their lowest rank.

    Attributes:
        world: all ranks.
        node: the ranks that share memory with this one.
        cross: the ranks with this local rank, one of each node that has it.
        nodes: the world ranks of each node.
        slices: how many ranks every node has; local ranks below it exist on every node.
    """

    def __init__(
        self,
        world: MPI.Comm,
        node: MPI.Comm,
        cross: MPI.Comm,
        nodes: tuple[tuple[int, ...], ...],
    ) -> None:
        self.world = world
        self.node = node
        self.cross = cross
        self.nodes = nodes
        self.slices = min(len(ranks) for ranks in nodes)
        self.rank: int = world.rank
        self.size: int = world.size
        self.local_rank: int = node.rank
        self.local_size: int = node.size
        self.cross_rank: int = cross.rank
        self.cross_size: int = cross.size
        self.node_index = next(index for index, ranks in enumerate(nodes) if world.rank in ranks)

    @classmethod
    def create(cls, comm: MPI.Intracomm, *, node_of: Callable[[int], int] | None = None) -> Topology:
        """Find out how the ranks of `comm` are spread over nodes. Collective.

        Args:
            comm: the ranks of the job.
            node_of: testing aid: the node of a rank; by default, MPI says which ranks
                share memory, or `FUSION_TEST_NODES` does.
        """
        world = comm.Dup()
        color = node_of(world.rank) if node_of is not None else _node_in_environment()
        if color is None:
            node = world.Split_type(MPI.COMM_TYPE_SHARED, key=world.rank)
        else:
            node = world.Split(color, key=world.rank)
        leaders = world.allgather(node.bcast(world.rank, root=0))
        nodes = tuple(
            tuple(rank for rank, its in enumerate(leaders) if its == leader)
            for leader in sorted(set(leaders))
        )
        cross = world.Split(node.rank, key=world.rank)
        return cls(world, node, cross, nodes)

    def close(self) -> None:
        """Give back the communicators. Collective; not after a rank has failed."""
        for comm in (self.cross, self.node, self.world):
            comm.Free()


def _node_in_environment() -> int | None:
    size, rank = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
    text = os.environ.get(TEST_NODES)
    if not text:
        return None
    counts = [int(count) for count in text.split(",")]
    if sum(counts) != size or min(counts) < 1:
        raise ConfigError(
            f"{TEST_NODES}={text} describes {sum(counts)} ranks but the job has {size}: "
            "give the ranks of each node, for example 2,2, or unset it"
        )
    return [node for node, count in enumerate(counts) for _ in range(count)][rank]
