"""How a job ends when one rank does: promptly, with a reason, and never by hanging."""

from __future__ import annotations

import pytest

from tests.conftest import RunRanks

HEAD = """
import os, signal, sys, time
import torch
import fusion.torch as hvd

hvd.init()
rank = hvd.rank()
hvd.allreduce(torch.ones(3), name="warm-up")
"""
LONG = 50.0
"""Seconds that ranks sleep in these programs; a job that ends earlier did not wait for them."""


def test_an_uncaught_exception_ends_the_job_and_is_named_on_the_others(run_ranks: RunRanks) -> None:
    done = run_ranks(
        HEAD
        + """
if rank == 1:
    raise ValueError("a bug on one rank")
hvd.allreduce(torch.ones(2), name="x")
""",
        np=3,
        expect_failure=True,
    )
    for rank in (0, 2):
        assert "RankLeftError" in done.outputs[rank]
        assert "rank 1: it raised ValueError: a bug on one rank" in done.outputs[rank]
    assert done.outputs[1].count("Traceback") == 1


@pytest.mark.parametrize("code", ["1", "'a message'"])
def test_sys_exit_with_a_failure_ends_ranks_that_do_something_else(run_ranks: RunRanks, code: str) -> None:
    done = run_ranks(
        HEAD
        + f"""
if rank == 0:
    sys.exit({code})
time.sleep({LONG})
""",
        np=2,
        expect_failure=True,
    )
    assert done.elapsed < LONG
    assert "it exited with code 1" in done.outputs[0]


def test_an_exit_that_the_program_catches_ends_nothing(run_ranks: RunRanks) -> None:
    run_ranks(
        HEAD
        + """
try:
    sys.exit(3)
except SystemExit as error:
    assert error.code == 3
hvd.allreduce(torch.ones(2), name="x")
""",
        np=2,
    )


def test_a_rank_that_ends_well_but_early_is_named_and_the_job_can_go_on(run_ranks: RunRanks) -> None:
    done = run_ranks(
        HEAD
        + """
if rank == 1:
    sys.exit(0)
try:
    hvd.allreduce(torch.ones(2), name="x")
except hvd.RankLeftError as error:
    print("caught:", error)
""",
        np=2,
    )
    assert "caught:" in done.outputs[0] and "rank 1: it reached the end of its program" in done.outputs[0]


def test_a_rank_may_end_long_before_another(run_ranks: RunRanks) -> None:
    done = run_ranks(
        HEAD
        + """
if rank == 0:
    time.sleep(2)
    print("evaluated")
""",
        np=3,
    )
    assert "evaluated" in done.outputs[0]


def test_a_killed_rank_ends_the_job(run_ranks: RunRanks) -> None:
    done = run_ranks(
        HEAD
        + """
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
hvd.allreduce(torch.ones(2), name="x")
""",
        np=2,
        expect_failure=True,
    )
    assert done.elapsed < LONG


def test_a_broken_cycle_thread_is_an_error_on_every_rank_and_does_not_hang_the_end(
    run_ranks: RunRanks,
) -> None:
    done = run_ranks(
        HEAD
        + """
from fusion import runtime
from fusion.executor import CpuExecutor
if rank == 1:
    CpuExecutor.execute = lambda *arguments: 1 / 0
try:
    hvd.allreduce(torch.ones(2), name="x")
except hvd.FusionError as error:
    print("caught", type(error).__name__, error)
    time.sleep(1)
""",
        np=2,
        expect_failure=True,
    )
    assert "caught RuntimeBrokenError" in done.outputs[1] and "ZeroDivisionError" in done.outputs[1]
    assert "caught RankLeftError rank 1 failed" in done.outputs[0]


def test_the_program_hook_for_exceptions_still_runs(run_ranks: RunRanks) -> None:
    done = run_ranks(
        """
import sys
sys.excepthook = lambda kind, error, traceback: print("my hook saw", error)
"""
        + HEAD
        + """
raise ValueError("this")
""",
        np=1,
        expect_failure=True,
    )
    assert "my hook saw this" in done.outputs[0]


def test_shutdown_refuses_later_calls_and_init_starts_again(run_ranks: RunRanks) -> None:
    run_ranks(
        HEAD
        + """
hvd.shutdown()
hvd.shutdown()
assert not hvd.is_initialized()
for call in (hvd.rank, lambda: hvd.allreduce(torch.ones(2))):
    try:
        call()
    except hvd.NotInitializedError as error:
        assert "init()" in str(error)
    else:
        raise AssertionError("accepted after shutdown")
hvd.init()
assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2.0, 2.0]
""",
        np=2,
    )


def test_pending_handles_fail_at_shutdown(run_ranks: RunRanks) -> None:
    run_ranks(
        HEAD
        + """
handle = hvd.allreduce_async(torch.ones(2), name=f"only-{rank}")
hvd.shutdown()
assert isinstance(handle.exception(timeout=10), hvd.FusionError)
""",
        np=2,
    )


def test_a_stall_beyond_the_limit_is_the_same_error_everywhere(run_ranks: RunRanks) -> None:
    done = run_ranks(
        HEAD.replace("hvd.init()", "hvd.init(stall_warning_s=0.5, stall_shutdown_s=1.5)")
        + """
hvd.allreduce(torch.ones(2), name="a" if rank == 0 else "b")
""",
        np=2,
        expect_failure=True,
    )
    for output in done.outputs:
        assert "StallError" in output and "'a'" in output and "MISSING on rank 1" in output
    assert "WARNING: stalled: " in done.outputs[0]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_data_loader_workers_do_not_disturb_the_runtime(run_ranks: RunRanks, method: str) -> None:
    run_ranks(
        f"""
import torch
from torch.utils.data import DataLoader, TensorDataset
import fusion.torch as hvd

if __name__ == "__main__":
    hvd.init()
    data = TensorDataset(torch.arange(8.0))
    for epoch in range(2):
        loader = DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context="{method}")
        for (batch,) in loader:
            assert torch.equal(hvd.allreduce(batch, op=hvd.Sum), 2 * batch)
""",
        np=2,
    )


def test_a_forked_child_is_told_that_it_cannot_use_the_runtime(run_ranks: RunRanks) -> None:
    run_ranks(
        HEAD
        + """
child = os.fork()
if child == 0:
    try:
        hvd.allreduce(torch.ones(2))
    except hvd.NotInitializedError as error:
        os._exit(0 if "forked child" in str(error) else 4)
    os._exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2.0, 2.0]
""",
        np=2,
    )


def test_too_low_a_thread_level_is_refused_with_the_way_out(run_ranks: RunRanks) -> None:
    run_ranks(
        """
import mpi4py
mpi4py.rc.thread_level = "single"
from mpi4py import MPI
import fusion.torch as hvd
try:
    hvd.init()
except hvd.FusionError as error:
    assert "thread_level" in str(error)
else:
    raise AssertionError("accepted")
""",
        np=1,
    )


def test_an_mpi_that_has_been_finalized_is_refused(run_ranks: RunRanks) -> None:
    run_ranks(
        """
from mpi4py import MPI
import fusion.torch as hvd
MPI.Finalize()
try:
    hvd.init()
except hvd.FusionError as error:
    assert "finalized" in str(error)
else:
    raise AssertionError("init went on")
""",
        np=1,
    )


def test_the_program_may_use_mpi_beside_the_runtime(run_ranks: RunRanks) -> None:
    run_ranks(
        """
from mpi4py import MPI
import torch
import fusion.torch as hvd

comm = MPI.COMM_WORLD.Dup()
hvd.init(comm=comm)
handles = [hvd.allreduce_async(torch.ones(1000), name=str(index), op=hvd.Sum) for index in range(50)]
assert comm.allreduce(1) == comm.size
assert all(handle.result()[0] == comm.size for handle in handles)
hvd.shutdown()
assert comm.allreduce(1) == comm.size
""",
        np=2,
    )


def test_ranks_given_other_settings_use_those_of_rank_0_and_say_so(run_ranks: RunRanks) -> None:
    done = run_ranks(
        """
import os
import torch
import fusion.torch as hvd
from fusion import runtime

hvd.init(cycle_time_ms=1.0 + int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", 0))))
assert runtime.current().config.cycle_time_ms == 1.0
""",
        np=2,
    )
    assert "rank 1 uses rank 0's settings for cycle_time_ms" in done.outputs[1]
    assert "settings" not in done.outputs[0]


def test_importing_the_face_does_not_start_mpi(run_ranks: RunRanks) -> None:
    run_ranks(
        """
import sys
import fusion.torch
assert "mpi4py.MPI" not in sys.modules
""",
        np=1,
    )
