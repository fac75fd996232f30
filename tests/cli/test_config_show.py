"""`fusion config show`: effective values, and where each came from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from fusion.config import FIELDS
from tests.cli.support import environment, fusion


def test_the_table_has_every_key_with_its_value_and_origin(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("chunk_kb: 7\n")
    done = fusion(
        *("config", "show", "--config", tmp_path / "c.yaml"),
        HOROVOD_FUSION_THRESHOLD="1048576",
        COLUMNS="300",
    )
    rows = {line.split()[1]: line for line in done.stdout.splitlines() if line.startswith("│")}
    assert set(rows) == set(FIELDS)
    assert f"{tmp_path / 'c.yaml'}:1" in rows["chunk_kb"]
    assert "environment HOROVOD_FUSION_THRESHOLD" in rows["fusion_threshold_mb"]
    assert "default" in rows["cycle_time_ms"]


def test_programs_get_json(tmp_path: Path) -> None:
    done = fusion("config", "show", "--json", FUSION_CYCLE_TIME_MS="0.5")
    shown = json.loads(done.stdout)
    assert shown["cycle_time_ms"] == {"value": 0.5, "from": "environment FUSION_CYCLE_TIME_MS"}
    assert list(shown) == list(FIELDS)


def test_a_mistake_is_one_message_and_status_2(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("cycle_tim_ms: 7\n")
    done = fusion("config", "show", "--config", tmp_path / "c.yaml")
    assert done.returncode == 2
    assert "c.yaml:1: unknown key 'cycle_tim_ms'; did you mean 'cycle_time_ms'?" in done.stderr
    assert "Traceback" not in done.stderr


def test_it_loads_neither_torch_nor_mpi() -> None:
    code = (
        "import sys\nfrom fusion.cli.app import app\n"
        "app(['config', 'show'], standalone_mode=False)\n"
        "sys.exit(bool({'torch', 'mpi4py', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, check=False)
    assert done.returncode == 0
