"""The main job, from the outside: a network is trained, and all ranks end with the same bits."""

from __future__ import annotations

import pytest

from tests.conftest import RunRanks
from tests.hosts import TwoHosts
from tests.launch import ROOT

PROGRAM = ROOT / "scripts" / "train_digits.py"


@pytest.mark.parametrize("buckets", ["dynamic", "static"])
@pytest.mark.parametrize("np", [1, 2, 3])
def test_it_reaches_its_accuracy_with_identical_parameters(
    run_ranks: RunRanks, np: int, buckets: str
) -> None:
    done = run_ranks(PROGRAM, np, arguments=["--buckets", buckets], timeout=120)
    assert f"all {np} ranks hold bit-identical parameters" in done.outputs[0]


@pytest.mark.parametrize("buckets", ["dynamic", "static"])
def test_it_runs_on_two_hosts(run_ranks: RunRanks, two_hosts: TwoHosts, buckets: str) -> None:
    done = run_ranks(PROGRAM, 4, arguments=["--buckets", buckets], timeout=180, launcher=two_hosts)
    assert "all 4 ranks hold bit-identical parameters" in done.outputs[0]


def test_only_rank_0_reports(run_ranks: RunRanks) -> None:
    done = run_ranks(PROGRAM, 2, arguments=["--epochs", "8"], timeout=120)
    assert "test accuracy" in done.outputs[0]
    assert done.outputs[1] == ""


def test_too_low_an_accuracy_is_a_failure(run_ranks: RunRanks) -> None:
    done = run_ranks(PROGRAM, 2, arguments=["--epochs", "1"], timeout=120, expect_failure=True)
    assert "below 95%" in done.outputs[0]
