"""`fusion plan` as a user runs it: mostly from costs measured before, once with ranks."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import yaml

from fusion.config import load
from fusion.planning.costs import Costs, Curve
from tests.cli.support import ROOT, fusion, needs_launcher
from tests.hosts import TwoHosts, why_not

CURVE = Curve(wait_s=1e-4, cycle_s=1e-4, response_s=3e-4, tensor_s=1e-6, slopes=(8e-9,) * 4)


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    """What an earlier plan measured on two hosts."""
    path = tmp_path / "costs.json"
    measured = Costs((1, 1), "auto", 1 << 20, CURVE, CURVE)
    path.write_text(json.dumps({"costs": msgspec.to_builtins(measured)}))
    return path


def test_a_plan_shows_thresholds_and_the_optimum(costs: Path) -> None:
    done = fusion("plan", "resnet50", "--costs", costs, "--backward-ms", 500, "--forward-ms", 250)
    assert done.returncode == 0, done.stderr
    for words in ("161 tensors", "ring between nodes", "threshold MiB", "Optimal merging", "Nearest to it"):
        assert words in done.stdout


def test_json_has_everything_and_serves_as_costs_again(costs: Path, tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    words = ("plan", "tiny1000", "--backward-ms", 50, "--threshold-mb", 1, "--buckets", "static")
    assert fusion(*words, "--costs", costs, "--json", target).returncode == 0
    found = json.loads(target.read_text())
    assert [row["fusion_threshold_mb"] for row in found["thresholds"]] == [1.0, 64.0]
    assert found["buckets"] == "static"
    assert found["ranks"] == 2
    assert sum(len(group) for group in found["optimal"]["groups"]) == 1000
    assert found["optimal"]["step_ms"] <= min(row["step_ms"] for row in found["thresholds"])
    again = tmp_path / "again.json"
    assert fusion(*words, "--costs", target, "--json", again).returncode == 0
    assert json.loads(again.read_text()) == found


def test_the_yaml_is_a_configuration(costs: Path, tmp_path: Path) -> None:
    target = tmp_path / "tuned.yaml"
    done = fusion(
        "plan", "resnet50", "--costs", costs, "--backward-ms", 500, "--buckets", "static", "--yaml", target
    )
    assert done.returncode == 0, done.stderr
    config = load(str(target), environ={}).config
    assert config.buckets == "static"
    assert 0 < config.fusion_threshold_mb < 64
    assert set(yaml.safe_load(target.read_text())) == {"fusion_threshold_mb", "buckets"}


def test_a_trace_is_planned_for(costs: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    lines = [{"name": f"t{n}", "shape": [1000], "dtype": "float32", "ready_ms": n} for n in range(3)]
    trace.write_text(json.dumps(lines))
    done = fusion("plan", trace, "--costs", costs)
    assert "3 tensors" in done.stdout
    assert "backward 2 ms" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("resnet51", "-np", 2), "nor one of the built-in sets"),
        (("no.such.module:make", "--costs", "COSTS"), "'no.such.module' cannot be imported"),
        (("json:dumps", "--costs", "COSTS"), "dumps"),
        (("/no/such/trace.json", "-np", 2), "cannot be read"),
        (("resnet50",), "-np N"),
        (("resnet50", "-np", 1), "one rank"),
        (("resnet50", "--costs", "/no/costs.json"), "no costs in this file"),
        (("resnet50", "--costs", "COSTS", "--buckets", "big"), "dynamic, static"),
        (("resnet50", "--costs", "COSTS", "--json", "/no/folder/plan.json"), "cannot be written"),
    ],
)
def test_bad_input_is_one_line_and_no_traceback(costs: Path, words: tuple[object, ...], message: str) -> None:
    done = fusion("plan", *(costs if word == "COSTS" else word for word in words))
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("fusion plan: ")
    assert "Traceback" not in done.stderr


MODEL = """
import torch

print("a word from the model")


def make():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)), torch.ones(2, 8)
"""


class Place(NamedTuple):
    """Where two ranks measure."""

    words: tuple[str, ...]
    before: tuple[str, ...]
    nodes: list[int]


@pytest.fixture
def place() -> Iterator[Place]:
    """Two hosts, or this one where they cannot be made: both would take twice ten seconds."""
    if why_not() is not None:
        yield Place((), (), [2])
        return
    with TwoHosts() as hosts:
        each = ",".join(f"{address}:1" for address in hosts.addresses)
        words = ("-H", each, "--mpi-arg", shlex.join(hosts.options()))
        yield Place(words, tuple(hosts.on(0)), [1, 1])


@needs_launcher
def test_ranks_measure_a_module(tmp_path: Path, place: Place) -> None:
    (tmp_path / "planned_models.py").write_text(MODEL)
    target = tmp_path / "plan.json"
    done = fusion(
        *("plan", "planned_models:make", "-np", 2, *place.words, "--experiment-s", 0.001, "--json", target),
        before=place.before,
        PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}",
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(target.read_text())
    assert (found["tensors"], found["ranks"], found["nodes"]) == (4, 2, place.nodes)
    assert found["backward_ms"] > 0


@needs_launcher
def test_what_is_wrong_on_the_ranks_is_said_once() -> None:
    done = fusion("plan", "json:dumps", "-np", 2)
    assert done.returncode == 2
    assert done.stderr.count("fusion plan: json:dumps: dumps() failed") == 1
