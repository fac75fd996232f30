"""`fusion tune` on a user's script, with real ranks."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

from fusion.config import load
from tests.cli.support import fusion, needs_launcher

pytestmark = [
    needs_launcher,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="process trees are read from /proc"),
]

SCRIPT = """
import itertools, sys
import torch
import fusion.torch as hvd
hvd.init()
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for step in itertools.count() if sys.argv[1] == "forever" else range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
hvd.shutdown()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_a_script_is_tuned_and_ended_and_the_file_can_be_loaded(tmp_path: Path, script: Path) -> None:
    out, log = tmp_path / "t.yaml", tmp_path / "t.csv"
    done = fusion("tune", "-np", 2, "--samples", 4, "--stop", "--out", out, "--log", log, script, "forever")
    assert done.returncode == 0, done.stderr
    assert "Tuned in 4 samples." in done.stdout
    assert f"Written to {out}" in done.stdout
    assert len(list(csv.DictReader(log.open()))) == 4
    assert load(out, environ={}).pinned


def test_a_script_that_ends_early_leaves_what_was_found_and_pinned_keys(tmp_path: Path, script: Path) -> None:
    given = tmp_path / "mine.yaml"
    given.write_text("chunk_kb: 512\n")
    out = tmp_path / "t.yaml"
    done = fusion("tune", "-np", 1, "--config", given, "--out", out, script, 300)
    assert done.returncode == 0, done.stderr
    assert "the program ended before the search did" in done.stdout
    loaded = load(out, environ={})
    assert loaded.config.chunk_kb == 512
    assert loaded.pinned == {"fusion_threshold_mb", "cycle_time_ms", "chunk_kb"}


def test_where_every_key_was_set_it_says_so_and_starts_nothing(tmp_path: Path, script: Path) -> None:
    default = Path(__file__).parents[2] / "configs" / "default.yaml"
    done = fusion("tune", "-np", 2, "--config", default, script, 1)
    assert done.returncode == 2
    assert "every key was set" in done.stderr
    assert "default.yaml" in done.stderr
