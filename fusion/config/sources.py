"""Where settings come from, and which source wins.

`load` is called once by `init`, and by the command line, before any thread is
started. Strongest first:

1. an argument: a keyword of `init`;
2. the environment: `FUSION_*`, then the `HOROVOD_*` variables that mean the same;
3. the base: the mapping, `Config` or YAML file given to `init`, or, when none was
   given, the YAML file that `FUSION_CONFIG` names;
4. the default.

Every value keeps its `Origin`, so that a key which the user set to its default
can be told from one left alone: only the former is pinned.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import yaml
from msgspec import Struct

from coordinator.errors import ConfigError
from fusion.config.schema import FIELDS, Config

CONFIG_VARIABLE = "FUSION_CONFIG"
# Begins the names of aids for tests, which are no settings.
TEST_PREFIX = "FUSION_TEST_"


class Origin(Struct, frozen=True):
    """Where a value came from; `str()` of it is for people.

    Attributes:
        kind: how strong the source is.
        place: file and line, name of the variable, or nothing.
    """

    kind: Literal["default", "mapping", "file", "environment", "argument"]
    place: str = ""

    def __str__(self) -> str:
        if self.kind == "file":
            return self.place
        return f"{self.kind} {self.place}".strip()


class Loaded(Struct, frozen=True):
    """The effective settings and where each came from."""

    config: Config
    origins: dict[str, Origin]

    @property
    def pinned(self) -> frozenset[str]:
        """The keys that the user gave; tuning must leave them alone."""
        return frozenset(key for key, origin in self.origins.items() if origin.kind != "default")

    def describe(self) -> str:
        """A line for each key: its value and where that came from."""
        lines = []
        for key, value in self.config.to_dict().items():
            shown = "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
            lines.append(f"{key} = {shown} ({self.origins[key]})")
        return "\n".join(lines)


class _Item(Struct, frozen=True):
    """One setting as a source gave it."""

    key: str
    value: Any
    origin: Origin
    text: bool = False


def load(
    source: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    **overrides: Any,
) -> Loaded:
    """Collect, check and combine the settings of all sources.

    Args:
        source: the base: a mapping, the path of a YAML file, or a `Config`, of which
            the values that differ from the defaults count as given.
        environ: the environment to read.
        overrides: single settings, stronger than everything else.

    Raises:
        ConfigError: an unknown key or a bad value anywhere, even in a source that
            a stronger one overrides; names the key and the place.
    """
    values = {key: field.default for key, field in FIELDS.items()}
    origins = {key: Origin("default") for key in FIELDS}
    arguments = (_Item(key, value, Origin("argument")) for key, value in overrides.items())
    for items in (_base(source, environ), _environment(environ), arguments):
        for item in items:
            values[item.key] = _checked(item)
            origins[item.key] = item.origin
    return Loaded(Config(**values), origins)


def _checked(item: _Item) -> Any:
    if item.key not in FIELDS:
        raise ConfigError(f"{_where(item.origin)}unknown key {item.key!r}{_nearest(item.key, FIELDS)}")
    value = os.fspath(item.value) if isinstance(item.value, os.PathLike) else item.value
    try:
        return FIELDS[item.key].check(value, text=item.text)
    except ValueError as error:
        raise ConfigError(f"{_where(item.origin)}{error}") from None


def _where(origin: Origin) -> str:
    return f"{origin}: "


def _nearest(name: str, known: Iterable[str]) -> str:
    """What to do about a name that is not known."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return "; the known ones are " + ", ".join(known)


def _base(
    source: Config | Mapping[str, Any] | str | os.PathLike[str] | None, environ: Mapping[str, str]
) -> Iterator[_Item]:
    if source is None:
        named = environ.get(CONFIG_VARIABLE)
        return _file(named, f"{CONFIG_VARIABLE} names a file that") if named else iter(())
    if isinstance(source, Config):
        changed = ((key, value) for key, value in source.to_dict().items() if value != FIELDS[key].default)
        return (_Item(key, value, Origin("mapping", "(a Config)")) for key, value in changed)
    if isinstance(source, Mapping):
        return (_Item(key, value, Origin("mapping")) for key, value in source.items())
    if isinstance(source, (str, os.PathLike)):
        return _file(source, "the configuration file")
    raise ConfigError(f"settings must be a mapping, the path of a YAML file, or a Config; got {source!r}")


def _file(path: str | os.PathLike[str], what: str) -> Iterator[_Item]:
    """Yield the keys of a YAML file with their line numbers."""
    name = os.fspath(path)
    try:
        with open(name, encoding="utf-8") as stream:
            yield from _mapping(yaml.SafeLoader(stream.read()), name)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{name}: {what} cannot be read: {reason}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{name}{line}: this is not YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: this is not YAML: {error}") from error


def _mapping(loader: yaml.SafeLoader, name: str) -> Iterator[_Item]:
    root = loader.get_single_node()
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{name}:{root.start_mark.line + 1}: expected lines of the form `key: value`")
    lines: dict[str, int] = {}
    for key_node, value_node in root.value:
        # YAML reads a bare `on` or `5` as no string; a key is its text all the same.
        key, line = str(key_node.value), key_node.start_mark.line + 1
        if key in lines:
            raise ConfigError(f"{name}:{line}: {key!r} was already set in line {lines[key]}; remove one")
        lines[key] = line
        yield _Item(key, loader.construct_object(value_node, deep=True), Origin("file", f"{name}:{line}"))


def _own_variables() -> dict[str, str]:
    """Names of our variables and the key each sets.

    `FUSION_` is not doubled for a key that already begins so, but the doubled name
    that the rule would give is accepted too.
    """
    names = {f"FUSION_{key.upper()}": key for key in FIELDS}
    short = {key.upper(): key for key in FIELDS if key.startswith("fusion_")}
    return {**names, **short}


OWN_VARIABLES = _own_variables()


def _horovod_flag(text: str) -> bool:
    """Horovod's own reading: a number other than 0 is on."""
    try:
        return int(text) != 0
    except ValueError:
        raise ValueError(f"must be 0 or 1; got {text!r}") from None


def _horovod_mib(text: str) -> float:
    try:
        return int(text) / (1 << 20)
    except ValueError:
        raise ValueError(f"must be a whole number of bytes; got {text!r}") from None


def _horovod_timeline(text: str) -> str | None:
    """`DYNAMIC` asks Horovod to wait for `start_timeline`, which needs no setting here."""
    return None if text.upper() == "DYNAMIC" else text


def _horovod_level(text: str) -> str:
    return {"trace": "debug", "fatal": "critical"}.get(text.lower(), text)


# Variable, key, and how to turn its text into the key's unit; None leaves the key alone.
# A later line wins: STALL_CHECK_DISABLE over the time that it makes meaningless.
_HOROVOD: tuple[tuple[str, str, Callable[[str], Any]], ...] = (
    ("HOROVOD_FUSION_THRESHOLD", "fusion_threshold_mb", _horovod_mib),
    ("HOROVOD_CYCLE_TIME", "cycle_time_ms", str),
    ("HOROVOD_CACHE_CAPACITY", "cache_capacity", str),
    ("HOROVOD_HIERARCHICAL_ALLREDUCE", "hierarchy", lambda text: "on" if _horovod_flag(text) else "off"),
    ("HOROVOD_STALL_CHECK_TIME_SECONDS", "stall_warning_s", str),
    ("HOROVOD_STALL_CHECK_DISABLE", "stall_warning_s", lambda text: 0.0 if _horovod_flag(text) else None),
    ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "stall_shutdown_s", str),
    ("HOROVOD_LOG_LEVEL", "log_level", _horovod_level),
    ("HOROVOD_TIMELINE", "timeline", _horovod_timeline),
    ("HOROVOD_AUTOTUNE", "autotune", lambda text: "on" if _horovod_flag(text) else "off"),
    ("HOROVOD_AUTOTUNE_LOG", "autotune_log", str),
    ("HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "autotune_samples", str),
)

HOROVOD_VARIABLES = {variable: key for variable, key, _ in _HOROVOD}


def _environment(environ: Mapping[str, str]) -> Iterator[_Item]:
    """Yield the settings of the environment, weakest first; an empty variable counts as unset."""
    for variable, key, read in _HOROVOD:
        text = environ.get(variable)
        if not text:
            continue
        origin = Origin("environment", variable)
        try:
            value = read(text)
        except ValueError as error:
            raise ConfigError(f"{_where(origin)}{error}") from None
        if value is not None:
            yield _Item(key, value, origin, text=isinstance(value, str))
    for variable, text in sorted(environ.items()):
        ours = variable.startswith("FUSION_") and not variable.startswith(TEST_PREFIX)
        if ours and text and variable != CONFIG_VARIABLE:
            yield _own(variable, text)


def _own(variable: str, text: str) -> _Item:
    origin = Origin("environment", variable)
    if variable not in OWN_VARIABLES:
        hint = _nearest(variable, OWN_VARIABLES)
        raise ConfigError(f"{_where(origin)}unknown setting{hint}; unset it if it is another program's")
    return _Item(OWN_VARIABLES[variable], text, origin, text=True)
