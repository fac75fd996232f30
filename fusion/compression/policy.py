"""Which tensors are compressed by what: one method for most, rules for the others.

A pure function of names and shapes, so every rank decides alike. Tensors that get the same
compressor and have the same dtype share buckets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import msgspec

from coordinator.errors import ConfigError
from fusion.compression.base import Compressor, check_whole
from fusion.compression.cast import Uncompressed
from fusion.compression.registry import parse
from fusion.config import Config

DENSE_BELOW = 1024
"""Elements of the smallest tensor that is compressed by default."""


class Policy(msgspec.Struct, frozen=True):
    """What `DistributedOptimizer(compression=...)` can be told beside a method.

    Args:
        compressor: for tensors that no rule is about; a specification such as "topk:0.01" works too.
        rules: pattern of names -> compressor, specification or "none", as a mapping or as pairs; the first
            that matches counts. Patterns are those of shells, case matters: `*.bias`, `embed*`.
        dense_below: tensors of fewer elements travel as they are, unless a rule is about them.
        dense_vectors: so do tensors of fewer than two dimensions, such as biases and norms.
        warmup_steps: everything travels as it is for so many steps.

    Raises:
        ValueError: there is no such method or setting.
    """

    compressor: Compressor
    rules: tuple[tuple[str, Compressor], ...] = ()
    dense_below: int = DENSE_BELOW
    dense_vectors: bool = True
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        rules: Any = self.rules
        pairs = rules.items() if isinstance(rules, Mapping) else rules or ()
        checked = tuple((_pattern(pattern), _compressor(method)) for pattern, method in pairs)
        msgspec.structs.force_setattr(self, "rules", checked)
        msgspec.structs.force_setattr(self, "compressor", _compressor(self.compressor))
        check_whole(self.dense_below, 0, 1 << 62, "dense_below")
        check_whole(self.warmup_steps, 0, 1 << 62, "warmup_steps")

    def choose(self, name: str, shape: Sequence[int]) -> Compressor:
        """The compressor of a tensor; `none` for one that travels as it is."""
        for pattern, compressor in self.rules:
            if fnmatchcase(name, pattern):
                return compressor
        if prod(shape) < self.dense_below or (self.dense_vectors and len(shape) < 2):
            return Uncompressed()
        return self.compressor

    @property
    def compresses(self) -> bool:
        """Whether any tensor may be compressed."""
        return any(method != Uncompressed() for method in (self.compressor, *(m for _, m in self.rules)))

    @property
    def terms(self) -> str:
        """All of it in one line, for ranks to compare."""
        words = [self.compressor.spec]
        words += [f"{pattern} -> {compressor.spec}" for pattern, compressor in self.rules]
        words.append(f"dense below {self.dense_below}" + (" and vectors" if self.dense_vectors else ""))
        if self.warmup_steps:
            words.append(f"after {self.warmup_steps} steps")
        return "; ".join(words)


def policy_from(config: Config) -> Policy:
    """What the settings say.

    Raises:
        ValueError: there is no such method or setting.
    """
    compressor, rules = _compressor(config.compression), tuple((config.compression_rules or {}).items())
    return Policy(
        compressor,
        tuple((pattern, _compressor(method)) for pattern, method in rules),
        config.compression_dense_below,
        warmup_steps=config.compression_warmup_steps,
    )


def check_settings(config: Config, origins: Mapping[str, object]) -> None:
    """Refuse settings that name no compressor, before anything is started.

    Raises:
        ConfigError: names the key and where its value came from.
    """
    named = [("compression", config.compression)]
    named += [("compression_rules", method) for method in (config.compression_rules or {}).values()]
    for key, method in named:
        try:
            parse(method)
        except ValueError as error:
            raise ConfigError(f"{origins[key]}: {key}: {error}") from None


def _pattern(pattern: Any) -> str:
    if not isinstance(pattern, str):
        raise TypeError(f"a rule of compression is for a pattern of names such as '*.bias', not {pattern!r}")
    return pattern


def _compressor(method: Any) -> Compressor:
    return method if isinstance(method, Compressor) else parse(method)
