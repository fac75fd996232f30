"""configs/federated.yaml and what can be wrong in such a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.errors import ConfigError
from fusion.federated.async_rules import FedBuff
from fusion.federated.settings import check, load

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def test_the_files_that_ship_are_accepted() -> None:
    assert len(load(CONFIGS / "federated_compression.yaml").runs) == 7
    settings = load(CONFIGS / "federated.yaml")
    assert settings.data.clients == 8
    assert settings.devices.slower == {0: 10}
    assert {type(run).__name__ for run in settings.runs} == {"Sync", "FedAsync", "FedBuff"}


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text("")
    assert load(tmp_path / "f.yaml") == check({})


def test_a_run_builds_what_it_names() -> None:
    server = {"method": "fedadam", "lr": 0.5}
    run = check({"runs": [{"name": "a", "method": "fedbuff", "size": 3, "server": server}]}).runs[0]
    rule = run.build()
    assert isinstance(rule, FedBuff)
    assert rule.size == 3
    assert rule.server.lr == 0.5


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"epochs": 3}, "unknown field `epochs`"),
        ({"training": {"epoch": 3}}, r"unknown field `epoch`.*training"),
        ({"training": {"lr": -1}}, r"training.lr"),
        ({"training": {"lr": float("nan")}}, "lr"),
        ({"data": {"alpha": float("nan")}}, "alpha"),
        ({"data": {"clients": 0}}, "clients"),
        ({"devices": {"slower": {9: 10}}}, r"clients \[9\]"),
        ({"devices": {"slower": {1: 0.5}}}, "slower"),
        ({"runs": []}, "runs"),
        ({"runs": [{"name": "a", "method": "fedprox"}]}, "fedprox"),
        ({"runs": [{"name": "a", "method": "fedasync", "size": 2}]}, "unknown field `size`"),
        ({"runs": [{"name": "a", "method": "fedasync", "mixing": 1.5}]}, "run 'a': mixing"),
        ({"runs": [{"name": "a", "method": "sync", "compression": "topk:2"}]}, "run 'a'.*ratio"),
        ({"runs": [{"name": "a", "method": "fedbuff", "staleness": {"kind": "linear"}}]}, "linear"),
        ({"runs": [{"name": "a", "method": "sync"}, {"name": "a", "method": "sync"}]}, "name of its own"),
        (
            {"runs": [{"name": "a", "method": "fedbuff", "staleness": {"alpha": 1.0}}]},
            "unknown field `alpha`",
        ),
        ([1], "Expected"),
    ],
)
def test_what_is_wrong_is_named(found, message) -> None:
    with pytest.raises(ConfigError, match=message):
        check(found)


def test_a_key_that_comes_twice_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text("data:\n  clients: 3\n  clients: 4\n")
    with pytest.raises(ConfigError, match=r"f\.yaml:3: 'clients' is set twice"):
        load(tmp_path / "f.yaml")


def test_a_file_that_is_no_yaml_is_named(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text("a: [1")
    with pytest.raises(ConfigError, match=r"f\.yaml"):
        load(tmp_path / "f.yaml")
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        load(tmp_path / "none.yaml")
