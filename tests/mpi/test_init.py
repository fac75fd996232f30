"""What `init` tells those who read the log."""

from __future__ import annotations

from tests.conftest import RunRanks

PROGRAM = """
import fusion.torch as hvd

hvd.init(cycle_time_ms=2, log_level="info")
hvd.barrier()
"""


def test_rank_0_logs_where_every_setting_came_from(run_ranks: RunRanks) -> None:
    done = run_ranks(PROGRAM, 2, env={"FUSION_CHUNK_KB": "512"})
    first, second = done.outputs
    assert "[fusion rank 0] INFO: settings:\n" in first
    assert "cycle_time_ms = 2 (argument)\n" in first
    assert "chunk_kb = 512 (environment FUSION_CHUNK_KB)\n" in first
    assert "hierarchy = auto (default)\n" in first
    assert "chosen by the runtime: ring_segment_kb " in first
    assert "settings:" not in second and "chosen" not in second
