"""Settings: precedence, units, and what is said about mistakes."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.errors import ConfigError
from fusion.config import FIELDS, Config, Origin, load
from fusion.config.sources import HOROVOD_VARIABLES, OWN_VARIABLES

ROOT = Path(__file__).parents[2]
# The settings of federated training are read by its own script, and tested with it.
CONFIGS = sorted(path for path in (ROOT / "configs").glob("*.yaml") if not path.stem.startswith("federated"))


def _yaml(folder: Path, text: str) -> Path:
    path = folder / "c.yaml"
    path.write_text(text)
    return path


def test_without_sources_everything_is_default_and_nothing_is_pinned() -> None:
    loaded = load(environ={})
    assert loaded.config == Config()
    assert loaded.pinned == frozenset()


def test_an_argument_beats_environment_file_and_default(tmp_path: Path) -> None:
    path = _yaml(tmp_path, "cycle_time_ms: 2\n")
    environ = {"FUSION_CYCLE_TIME_MS": "3", "HOROVOD_CYCLE_TIME": "4"}
    loaded = load(path, environ=environ, cycle_time_ms=5)
    assert loaded.config.cycle_time_ms == 5
    assert loaded.origins["cycle_time_ms"] == Origin("argument")


def test_our_variable_beats_horovods(tmp_path: Path) -> None:
    environ = {"FUSION_CYCLE_TIME_MS": "3", "HOROVOD_CYCLE_TIME": "4"}
    loaded = load(_yaml(tmp_path, "cycle_time_ms: 2\n"), environ=environ)
    assert loaded.config.cycle_time_ms == 3
    assert str(loaded.origins["cycle_time_ms"]) == "environment FUSION_CYCLE_TIME_MS"


def test_horovods_variable_beats_the_file(tmp_path: Path) -> None:
    loaded = load(_yaml(tmp_path, "cycle_time_ms: 2\n"), environ={"HOROVOD_CYCLE_TIME": "4"})
    assert loaded.config.cycle_time_ms == 4
    assert str(loaded.origins["cycle_time_ms"]) == "environment HOROVOD_CYCLE_TIME"


def test_a_value_from_a_file_remembers_its_line(tmp_path: Path) -> None:
    path = _yaml(tmp_path, "# a comment\n\ncycle_time_ms: 2\nlog_level: info\n")
    origins = load(path, environ={}).origins
    assert str(origins["cycle_time_ms"]) == f"{path}:3"
    assert str(origins["log_level"]) == f"{path}:4"


def test_the_environment_names_the_file_when_no_base_is_given(tmp_path: Path) -> None:
    path = _yaml(tmp_path, "chunk_kb: 7\n")
    assert load(environ={"FUSION_CONFIG": str(path)}).config.chunk_kb == 7


def test_a_base_that_is_given_takes_the_place_of_the_file_in_the_environment(tmp_path: Path) -> None:
    path = _yaml(tmp_path, "chunk_kb: 7\n")
    loaded = load({"cycle_time_ms": 2}, environ={"FUSION_CONFIG": str(path)})
    assert (loaded.config.chunk_kb, loaded.config.cycle_time_ms) == (0, 2)


def test_the_environment_beats_a_mapping() -> None:
    loaded = load({"cycle_time_ms": 2, "chunk_kb": 5}, environ={"FUSION_CYCLE_TIME_MS": "3"})
    assert (loaded.config.cycle_time_ms, loaded.config.chunk_kb) == (3, 5)
    assert str(loaded.origins["chunk_kb"]) == "mapping"


def test_a_config_is_a_base_too() -> None:
    loaded = load(Config(chunk_kb=5), environ={}, cycle_time_ms=2)
    assert loaded.config == Config(chunk_kb=5, cycle_time_ms=2)
    assert loaded.pinned == {"chunk_kb", "cycle_time_ms"}


def test_a_key_set_to_its_default_is_pinned_and_one_left_alone_is_not(tmp_path: Path) -> None:
    loaded = load(_yaml(tmp_path, "fusion_threshold_mb: 64\n"), environ={})
    assert loaded.config == Config()
    assert loaded.pinned == {"fusion_threshold_mb"}


@pytest.mark.parametrize(
    ("variable", "text", "key", "value"),
    [
        ("HOROVOD_FUSION_THRESHOLD", "33554432", "fusion_threshold_mb", 32.0),
        ("HOROVOD_FUSION_THRESHOLD", "0", "fusion_threshold_mb", 0.0),
        ("HOROVOD_CYCLE_TIME", "2.5", "cycle_time_ms", 2.5),
        ("HOROVOD_CACHE_CAPACITY", "0", "cache_capacity", 0),
        ("HOROVOD_HIERARCHICAL_ALLREDUCE", "1", "hierarchy", "on"),
        ("HOROVOD_HIERARCHICAL_ALLREDUCE", "0", "hierarchy", "off"),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "30", "stall_warning_s", 30.0),
        ("HOROVOD_STALL_CHECK_DISABLE", "1", "stall_warning_s", 0.0),
        ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "90", "stall_shutdown_s", 90.0),
        ("HOROVOD_LOG_LEVEL", "TRACE", "log_level", "debug"),
        ("HOROVOD_LOG_LEVEL", "fatal", "log_level", "critical"),
        ("HOROVOD_TIMELINE", "/tmp/t.json", "timeline", "/tmp/t.json"),
        ("HOROVOD_AUTOTUNE", "1", "autotune", "on"),
        ("HOROVOD_AUTOTUNE", "0", "autotune", "off"),
        ("HOROVOD_AUTOTUNE_LOG", "/tmp/t.csv", "autotune_log", "/tmp/t.csv"),
        ("HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "20", "autotune_samples", 20),
    ],
)
def test_horovods_variables_keep_their_units(variable: str, text: str, key: str, value: object) -> None:
    loaded = load(environ={variable: text})
    assert loaded.config.to_dict()[key] == value
    assert loaded.pinned == {key}
    assert HOROVOD_VARIABLES[variable] == key


def test_a_disabled_stall_check_overrides_its_time() -> None:
    environ = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "30", "HOROVOD_STALL_CHECK_DISABLE": "1"}
    assert load(environ=environ).config.stall_warning_s == 0


@pytest.mark.parametrize(
    ("variable", "text"), [("HOROVOD_STALL_CHECK_DISABLE", "0"), ("HOROVOD_TIMELINE", "DYNAMIC")]
)
def test_a_horovod_variable_that_asks_for_nothing_pins_nothing(variable: str, text: str) -> None:
    assert load(environ={variable: text}).pinned == frozenset()


def test_an_empty_variable_counts_as_unset() -> None:
    environ = {"FUSION_CYCLE_TIME_MS": "", "HOROVOD_CYCLE_TIME": "", "FUSION_CONFIG": ""}
    assert load(environ=environ).pinned == frozenset()


def test_the_prefix_is_not_doubled_but_may_be() -> None:
    for variable in ("FUSION_THRESHOLD_MB", "FUSION_FUSION_THRESHOLD_MB"):
        assert load(environ={variable: "2"}).config.fusion_threshold_mb == 2


@pytest.mark.parametrize("key", FIELDS)
def test_every_key_has_a_variable(key: str) -> None:
    assert key in OWN_VARIABLES.values()


@pytest.mark.parametrize("value", [-1, "64MB", "64", True, None, float("nan"), float("inf"), 67108864, [1]])
def test_a_threshold_that_is_no_number_of_mib_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="fusion_threshold_mb must be a number of MiB from 0 to 65,536"):
        load(environ={}, fusion_threshold_mb=value)


@pytest.mark.parametrize("value", [0, 0.5, 65536])
def test_a_threshold_may_be_zero_or_a_fraction(value: float) -> None:
    assert load(environ={}, fusion_threshold_mb=value).config.fusion_threshold_mb == value


@given(st.sampled_from([f for f in FIELDS.values() if f.bounds]), st.sampled_from(["below", "above"]))
def test_every_number_is_held_to_its_bounds(field: Any, side: str) -> None:
    low, high = field.bounds
    assert load(environ={}, **{field.key: low}).config.to_dict()[field.key] == low
    assert load(environ={}, **{field.key: high}).config.to_dict()[field.key] == high
    with pytest.raises(ConfigError, match=field.key):
        load(environ={}, **{field.key: low - 1 if side == "below" else high + 1})


@pytest.mark.parametrize("value", ["sometimes", 3, None])
def test_a_word_that_is_no_choice_is_answered_with_the_choices(value: object) -> None:
    with pytest.raises(ConfigError, match="hierarchy must be one of auto, on, off"):
        load(environ={}, hierarchy=value)


def test_yamls_bare_on_and_off_are_words_here(tmp_path: Path) -> None:
    assert load(_yaml(tmp_path, "hierarchy: on\n"), environ={}).config.hierarchy == "on"
    assert load(_yaml(tmp_path, "hierarchy: off\n"), environ={}).config.hierarchy == "off"


def test_a_description_says_of_every_key_where_its_value_came_from(tmp_path: Path) -> None:
    path = _yaml(tmp_path, "# threshold\nfusion_threshold_mb: 0.5\n")
    loaded = load(path, environ={"HOROVOD_CYCLE_TIME": "2"}, hierarchy="off")
    lines = loaded.describe().splitlines()
    assert len(lines) == len(FIELDS)
    assert f"fusion_threshold_mb = 0.5 ({path}:2)" in lines
    assert "cycle_time_ms = 2 (environment HOROVOD_CYCLE_TIME)" in lines
    assert "hierarchy = off (argument)" in lines
    assert "timeline = none (default)" in lines


def test_words_may_be_written_in_capitals() -> None:
    assert load(environ={"FUSION_LOG_LEVEL": "INFO"}).config.log_level == "info"


def test_a_timeline_may_be_a_path_object_or_switched_off(tmp_path: Path) -> None:
    assert load(environ={}, timeline=tmp_path / "t.json").config.timeline == str(tmp_path / "t.json")
    assert load({"timeline": "t.json"}, environ={"FUSION_TIMELINE": "none"}).config.timeline is None


def test_an_unknown_key_in_a_file_is_answered_with_place_and_nearest_key(tmp_path: Path) -> None:
    path = _yaml(tmp_path, "cycle_time_ms: 1\nfusion_treshold: 3\n")
    with pytest.raises(ConfigError) as caught:
        load(path, environ={})
    expected = f"{path}:2: unknown key 'fusion_treshold'; did you mean 'fusion_threshold_mb'?"
    assert str(caught.value) == expected


def test_a_bad_value_in_a_file_is_answered_with_its_place(tmp_path: Path) -> None:
    path = _yaml(tmp_path, "log_level: info\ncache_capacity: many\n")
    with pytest.raises(ConfigError, match=rf"{path}:2: cache_capacity must be a whole number .*'many'"):
        load(path, environ={})


def test_a_bad_value_is_an_error_even_where_a_stronger_source_overrides_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"c\.yaml:1"):
        load(_yaml(tmp_path, "chunk_kb: x\n"), environ={}, chunk_kb=3)


def test_an_unknown_variable_of_ours_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"environment FUSION_TRESHOLD_MB: .*'FUSION_THRESHOLD_MB'"):
        load(environ={"FUSION_TRESHOLD_MB": "3"})


@pytest.mark.parametrize(
    "variable", ["FUSION_CYCLE_TIME_MS", "HOROVOD_FUSION_THRESHOLD", "HOROVOD_HIERARCHICAL_ALLREDUCE"]
)
def test_a_bad_value_in_the_environment_names_the_variable(variable: str) -> None:
    with pytest.raises(ConfigError, match=f"environment {variable}: .*'soon'"):
        load(environ={variable: "soon"})


def test_other_horovod_variables_are_not_ours_to_judge() -> None:
    assert load(environ={"HOROVOD_GPU_OPERATIONS": "NCCL"}).config == Config()


def test_aids_for_tests_are_no_settings() -> None:
    assert load(environ={"FUSION_TEST_NODES": "1,3"}).pinned == frozenset()


def test_an_unknown_argument_is_answered_with_the_nearest_key() -> None:
    with pytest.raises(ConfigError, match="argument: unknown key 'cycle_time'; did you mean 'cycle_time_ms'"):
        load(environ={}, cycle_time=3)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("cycle_time_ms: 1\ncycle_time_ms: 2\n", "c.yaml:2: 'cycle_time_ms' was already set in line 1"),
        ("- cycle_time_ms\n", "c.yaml:1: expected lines of the form"),
        ("chunk_kb: 1\nlog_level: [info\n", "c.yaml:3: this is not YAML"),
        ("log_level: !!python/name:os.system\n", "c.yaml:1: this is not YAML"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused_with_the_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(_yaml(tmp_path, text), environ={})


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    assert load(_yaml(tmp_path, "# only a comment\n"), environ={}).pinned == frozenset()


def test_a_missing_file_is_named_with_who_named_it(tmp_path: Path) -> None:
    gone = tmp_path / "gone.yaml"
    with pytest.raises(ConfigError, match=f"{gone}: FUSION_CONFIG names a file that cannot be read"):
        load(environ={"FUSION_CONFIG": str(gone)})


def test_a_base_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="settings must be a mapping"):
        load(3, environ={})  # type: ignore[arg-type]


def test_a_config_is_frozen_and_travels_between_ranks() -> None:
    config = Config(chunk_kb=5)
    with pytest.raises(AttributeError):
        config.chunk_kb = 6  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize("field", FIELDS.values(), ids=str)
def test_every_key_is_described_and_a_number_names_its_unit(field: Any) -> None:
    assert field.description.endswith(".")
    units = {
        "MiB": "_mb",
        "KiB": "_kb",
        "ms": "_ms",
        "s": "_s",
        "tensors": "",
        "samples": "",
        "elements": "",
        "steps": "",
        "": "",
    }
    assert field.key.endswith(units[field.unit])
    assert (field.bounds is None) == (field.unit == "")


def test_the_default_file_spells_out_the_defaults() -> None:
    loaded = load(ROOT / "configs" / "default.yaml", environ={})
    assert loaded.config == Config()
    assert loaded.pinned == set(FIELDS)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_files_that_come_with_the_package_load(path: Path) -> None:
    assert load(path, environ={}).pinned


@pytest.mark.parametrize("key", FIELDS)
def test_the_tuning_guide_has_every_key(key: str) -> None:
    assert f"`{key}`" in (ROOT / "docs" / "tuning.md").read_text()


def test_reading_settings_loads_neither_torch_nor_mpi() -> None:
    code = "import sys, fusion.config; sys.exit(bool({'torch', 'mpi4py', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
