"""The federated training script, from the outside."""

from __future__ import annotations

import json
from pathlib import Path

from tests.conftest import RunRanks
from tests.launch import ROOT

PROGRAM = ROOT / "scripts" / "train_federated.py"
SETTINGS = """
data: {clients: 5, alpha: 1.0}
devices: {slower: {0: 2}}
goal: {accuracy: 0.5, seconds: 40}
training: {lr: 0.2}
runs:
  - {name: rounds, method: sync, compression: "topk:0.2"}
  - {name: mixed, method: fedasync, max_staleness: 50}
  - {name: buffered, method: fedbuff, size: 3, server: {method: fedavgm, momentum: 0.5}}
"""


def test_all_methods_train_the_digits_and_are_compared(run_ranks: RunRanks, tmp_path: Path) -> None:
    config, results = tmp_path / "f.yaml", tmp_path / "f.json"
    config.write_text(SETTINGS)
    done = run_ranks(PROGRAM, 2, arguments=["--config", str(config), "--json", str(results)], timeout=150)
    assert "5 clients on 2 ranks" in done.outputs[0]
    assert done.outputs[1] == ""
    found = json.loads(results.read_text())
    assert found["ranks"] == 2
    assert list(found["runs"]) == ["rounds", "mixed", "buffered"]
    for (outcome,) in found["runs"].values():
        assert outcome["accuracy"] >= 0.5
        assert outcome["seconds"] > 0
        assert outcome["updates"] > 0
