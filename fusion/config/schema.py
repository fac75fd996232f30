"""The settings of the runtime: their names, units, defaults and bounds.

`Config` is the one definition; the loader, `fusion config show` and the messages
about bad values all read it from here. A `Config` is frozen and may be used from
any thread; a value that came through `load` is inside its bounds.
"""

from __future__ import annotations

import math
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct


class Config(Struct, frozen=True, kw_only=True):
    """Every setting. Units are in the names: mb and kb are MiB and KiB."""

    fusion_threshold_mb: Annotated[
        float,
        Meta(
            ge=0,
            le=65536,
            description="Most bytes of tensors fused into one buffer; 0 reduces each tensor alone.",
            extra={"unit": "MiB"},
        ),
    ] = 64.0
    cycle_time_ms: Annotated[
        float,
        Meta(
            ge=0,
            le=60_000,
            description="How long a part-filled buffer waits for more tensors.",
            extra={"unit": "ms"},
        ),
    ] = 1.0
    cache_capacity: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 24,
            description="Agreed tensors that are remembered, so that the next step need not describe them.",
            extra={"unit": "tensors"},
        ),
    ] = 16384
    buckets: Annotated[
        Literal["dynamic", "static"],
        Meta(description="dynamic: fuse what is ready; static: gradients are views into the fusion buffer."),
    ] = "dynamic"
    compression: Annotated[
        str,
        Meta(
            description="How gradients are compressed on their way, such as topk:0.01.",
            extra={"expects": "the name of a compressor and its settings, such as topk:0.01, or none"},
        ),
    ] = "none"
    compression_rules: Annotated[
        dict[str, str] | None,
        Meta(
            description="Other compressors, by patterns of parameter names; the first that matches counts.",
            extra={
                "expects": "a mapping from patterns of names to compressors (JSON in a variable), or null"
            },
        ),
    ] = None
    compression_dense_below: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 40,
            description="Smaller parameters, and all vectors, are not compressed unless a rule says so.",
            extra={"unit": "elements"},
        ),
    ] = 1024
    compression_warmup_steps: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 40,
            description="Steps at the beginning in which nothing is compressed.",
            extra={"unit": "steps"},
        ),
    ] = 0
    hierarchy: Annotated[
        Literal["auto", "on", "off"],
        Meta(description="Whether the ranks of a node combine their tensors before the ring between nodes."),
    ] = "auto"
    chunk_kb: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 20,
            description="Piece of a buffer that is packed, summed and unpacked at once inside a node; "
            "0 for 1024, or 2048 where ranks share cores.",
            extra={"unit": "KiB"},
        ),
    ] = 0
    ring_segment_kb: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 20,
            description="Size of one message of the ring between nodes; "
            "0 for what MPI sends at once, at most 120.",
            extra={"unit": "KiB"},
        ),
    ] = 0
    autotune: Annotated[
        Literal["off", "on"],
        Meta(description="Whether keys that were left alone are tuned while the program runs."),
    ] = "off"
    autotune_samples: Annotated[
        int,
        Meta(
            ge=1,
            le=10_000,
            description="Settings that tuning measures before it keeps the best of them.",
            extra={"unit": "samples"},
        ),
    ] = 40
    autotune_file: Annotated[
        str | None,
        Meta(description="YAML file that tuning writes its result to; null for none."),
    ] = None
    autotune_log: Annotated[
        str | None,
        Meta(description="CSV file with a line for every sample of tuning; null for none."),
    ] = None
    gpu: Annotated[
        Literal["auto", "nccl", "hierarchical", "host"],
        Meta(
            description="How ranks reduce tensors on GPUs: NCCL everywhere, NCCL in a node and MPI between, "
            "or through host memory."
        ),
    ] = "auto"
    gpu_sums: Annotated[
        Literal["float32", "native"],
        Meta(description="The type in which 16-bit floats are summed on GPUs."),
    ] = "float32"
    stall_warning_s: Annotated[
        float,
        Meta(
            ge=0,
            le=1e9,
            description="Warn about a tensor that waits this long for other ranks; 0 never warns.",
            extra={"unit": "s"},
        ),
    ] = 60.0
    stall_shutdown_s: Annotated[
        float,
        Meta(
            ge=0,
            le=1e9,
            description="Fail all ranks when a tensor has waited this long; 0 waits for ever.",
            extra={"unit": "s"},
        ),
    ] = 0.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error", "critical"],
        Meta(description="The least severe messages that the logger `fusion` lets through."),
    ] = "warning"
    timeline: Annotated[
        str | None,
        Meta(description="File that receives a trace for Perfetto or chrome://tracing; null for none."),
    ] = None
    timeline_max_mb: Annotated[
        float,
        Meta(
            ge=0.001,
            le=65536,
            description="Size at which a trace stops growing.",
            extra={"unit": "MiB"},
        ),
    ] = 64.0
    exit_grace_s: Annotated[
        float,
        Meta(
            ge=0,
            le=3600,
            description="How long an ending process waits for the other ranks to agree before it leaves.",
            extra={"unit": "s"},
        ),
    ] = 3.0

    def to_dict(self) -> dict[str, Any]:
        """All keys and values, in the order of declaration."""
        return msgspec.structs.asdict(self)


class Field(Struct, frozen=True):
    """What there is to know about one key of `Config`."""

    key: str
    default: Any
    type: Any
    description: str
    unit: str
    bounds: tuple[float, float] | None
    words: str = ""
    """The values allowed, in words, when neither choices nor bounds say it."""

    @property
    def choices(self) -> tuple[str, ...]:
        """The words allowed, when it is a choice among words."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    @property
    def expects(self) -> str:
        """The values allowed, in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.bounds is None:
            return self.words or "a path, or null"
        kind = "a whole number" if self.type is int else "a number"
        low, high = self.bounds
        return f"{kind} of {self.unit} from {low:,.10g} to {high:,.10g}"

    def check(self, value: object, *, text: bool = False) -> Any:
        """Return `value` as this key's type.

        Args:
            text: `value` is a string from the environment, to be read as the type.

        Raises:
            ValueError: it is not a value this key can take.
        """
        try:
            found = msgspec.convert(self._as_written(value, text), self.type, strict=not text)
        except msgspec.ValidationError:
            raise ValueError(f"{self.key} must be {self.expects}; got {value!r}") from None
        if self.bounds is None:
            return found
        low, high = self.bounds
        # The bounds are checked here because NaN passes msgspec's own comparison.
        if math.isnan(found) or not low <= found <= high:
            raise ValueError(f"{self.key} must be {self.expects}; got {value!r}")
        return found

    def _as_written(self, value: object, text: bool) -> object:
        """Undo what YAML and shells do to words: `on` is true in YAML 1.1, and case is free."""
        if self.choices:
            if isinstance(value, bool) and "on" in self.choices:
                return "on" if value else "off"
            return value.lower() if isinstance(value, str) else value
        if text and isinstance(self.type, UnionType) and str(value).lower() in ("null", "none"):
            return None
        if text and self.type == dict[str, str] | None:
            return _mapping(value)
        return value


def _mapping(text: object) -> object:
    """A mapping in a variable is JSON; what is not stays text, which is then refused."""
    try:
        return msgspec.json.decode(str(text))
    except msgspec.DecodeError:
        return text


def _fields() -> dict[str, Field]:
    hints = get_type_hints(Config, include_extras=True)
    fields = {}
    for declared in msgspec.structs.fields(Config):
        of, meta = get_args(hints[declared.name])
        fields[declared.name] = Field(
            key=declared.name,
            default=declared.default,
            type=of,
            description=meta.description,
            unit=(meta.extra or {}).get("unit", ""),
            bounds=None if meta.ge is None else (meta.ge, meta.le),
            words=(meta.extra or {}).get("expects", ""),
        )
    return fields


FIELDS = _fields()
