"""Broadcast: through shared memory inside a node, down a binomial tree between nodes.

Each node has a leader: the root on its own node, the first local rank on the
others. Chunk by chunk, a leader has the chunk in its half (packed by the root,
received by the others), sends it on to the leaders below, and every rank of its
node unpacks it from there.

Cost for S bytes on N nodes: a leader receives S bytes and sends at most
S ceil(log2 N), in messages of a chunk; one barrier a chunk; each rank reads and
writes S.
"""

from __future__ import annotations

from mpi4py import MPI

from fusion.collectives.job import Job, Means
from fusion.collectives.node import ranges
from fusion.packing import Span, Window


class Broadcast:
    """See the module."""

    def __init__(self, means: Means) -> None:
        self._means = means
        self._node = means.node

    def __call__(self, job: Job) -> None:
        means, node, layout = self._means, self._node, job.layout
        root = job.response.first.root_rank
        route = _Route(means, root)
        under_way: list[list[MPI.Request]] = [[], []]
        """Sends from each half."""
        for lo, hi in ranges(0, layout.total, node.chunk_bytes // layout.itemsize):
            parity = node.flip()
            memory = node.half(parity, route.leader, layout.dtype)[: hi - lo]
            window = Window(layout, [Span(lo, memory)])
            nbytes = (hi - lo) * layout.itemsize
            with means.phase("pack" if route.is_root else "reduce", (job.name,), nbytes):
                means.world.wait_all(under_way[parity])
                if route.is_root:
                    window.pack(job.tensors)
                elif route.parent is not None:
                    means.world.wait_all(means.world.receive(memory, route.parent))
                under_way[parity] = [r for child in route.children for r in means.world.send(memory, child)]
                node.barrier()
            if not (route.is_root and job.tensors.inputs[0] is job.tensors.outputs[0]):
                with means.phase("unpack", (job.name,), nbytes):
                    window.unpack(job.tensors)
        job.tensors.flush()
        means.world.wait_all(under_way[0] + under_way[1])


class _Route:
    """This rank's place in a broadcast.

    Attributes:
        leader: local rank of the leader of this node.
        parent: world rank to receive from, on leaders but the root.
        children: world ranks to send to, on leaders.
    """

    def __init__(self, means: Means, root: int) -> None:
        topology = means.topology
        nodes = topology.nodes
        top = next(index for index, ranks in enumerate(nodes) if root in ranks)
        leaders = [root if index == top else ranks[0] for index, ranks in enumerate(nodes)]
        here = topology.node_index
        self.is_root = topology.rank == root
        self.leader = nodes[here].index(leaders[here])
        self.parent: int | None = None
        self.children: list[int] = []
        if leaders[here] == topology.rank:
            parent, children = binomial((here - top) % len(nodes), len(nodes))
            self.parent = None if parent is None else leaders[(parent + top) % len(nodes)]
            self.children = [leaders[(child + top) % len(nodes)] for child in children]


def binomial(place: int, size: int) -> tuple[int | None, list[int]]:
    """Parent and children of a place in the binomial tree of `size` places with root 0.

    Children with the largest subtrees come first.
    """
    parent = place & (place - 1) if place else None
    limit = place & -place if place else size
    steps = [1 << bit for bit in range(size.bit_length()) if 1 << bit < limit]
    return parent, [place + step for step in reversed(steps) if place + step < size]
