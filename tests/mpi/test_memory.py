"""`memory_report`: what the runtime's own memory takes."""

from __future__ import annotations

import torch

import fusion.torch as hvd
from tests.ranks import ranks

INIT = None


@ranks(2)
def test_a_rank_is_told_its_part_of_every_buffer_and_what_static_buckets_take() -> None:
    hvd.init(fusion_threshold_mb=16, chunk_kb=512)
    fresh = hvd.memory_report()
    # Two halves of a chunk each, and between two nodes the vector of a whole buffer.
    assert 2 * 512 * 1024 <= fresh.buffers < (2 * 512 + 17 * 1024) * 1024
    assert (fresh.arenas, fresh.device_buffers, fresh.device_arenas) == (0, 0, 0)
    first = hvd.add_process_set([0])
    assert (hvd.memory_report().buffers > fresh.buffers) is (hvd.rank() == 0)
    hvd.remove_process_set(first)
    assert hvd.memory_report() == fresh

    model = torch.nn.Linear(100, 100)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), buckets="static"
    )
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    report = hvd.memory_report()
    assert report.arenas >= 4 * 10_100
    assert report.total == report.buffers + report.arenas + report.scratch
    assert str(report).startswith(f"{report.total / 2**20:.1f} MiB: buffers ")
    hvd.shutdown()
