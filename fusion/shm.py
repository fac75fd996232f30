"""Memory shared by the ranks of one node.

Called on the thread that owns MPI. Guarantees: all ranks of the job get their
mapping, or all raise the same error; nothing is left behind in the file system,
also after `kill -9`, because the file is unlinked as soon as every rank of the
node has mapped it.

Why a mapped file and not an MPI shared window: `torch.frombuffer` keeps the
mapping alive for as long as any tensor refers to it, so a gradient that lies in
it stays valid after `shutdown()`. A window dies with its communicator.
"""

from __future__ import annotations

import mmap
import os
import tempfile

from fusion.channel import Channel

DIRECTORY = "/dev/shm"  # noqa: S108 - memory is what this module is about; mkstemp makes the file ours
MIB = 1 << 20


def map_shared(node: Channel, world: Channel, nbytes: int, purpose: str) -> mmap.mmap:
    """Map `nbytes` of zeroed memory that all ranks of the node share. Collective over `world`.

    Args:
        node: the ranks that share the memory.
        world: all ranks, for agreeing that every node has succeeded.
        nbytes: size of the whole mapping; may differ between nodes, not inside one.
        purpose: what it is for and which setting makes it smaller, for the error message.

    Raises:
        FusionError: the memory cannot be had on some node; alike on every rank.
    """
    nbytes = max(nbytes, mmap.PAGESIZE)
    path, error = _create(nbytes, purpose) if node.rank == 0 else (None, None)
    path = node.broadcast_text(path, root=0)
    mapping = None
    if path:
        try:
            mapping = _map(path, nbytes)
        except OSError as failure:
            error = _message(nbytes, purpose, failure)
    try:
        world.agree(error)
    finally:
        if node.rank == 0 and path:
            os.unlink(path)
    assert mapping is not None  # Without a path, the first rank of the node had an error.
    return mapping


def _create(nbytes: int, purpose: str) -> tuple[str | None, str | None]:
    """The path of a new file that owns its space, or None and why there is none.

    Space is reserved here because a sparse file fails later, by SIGBUS.
    """
    path = None
    try:
        descriptor, path = tempfile.mkstemp(prefix="fusion-", dir=DIRECTORY)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        finally:
            os.close(descriptor)
        return path, None
    except OSError as failure:
        if path is not None:
            os.unlink(path)
        return None, _message(nbytes, purpose, failure)


def _map(path: str, nbytes: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(descriptor)


def _message(nbytes: int, purpose: str, failure: OSError) -> str:
    return (
        f"host {os.uname().nodename}: cannot get {nbytes / MIB:.1f} MiB of shared memory in {DIRECTORY} "
        f"for {purpose}: {failure.strerror or failure}. Make room there (see `df -h {DIRECTORY}`; in a "
        "container, raise --shm-size) or lower that setting"
    )
