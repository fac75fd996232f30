"""The methods by name, and how a setting, an environment variable or an agreed request names one.

    topk:0.01                  the method's first setting
    topk:ratio=0.01            the same
    int8:block=512,rounding=nearest
    powersgd:4,feedback=off

`Compressor.spec` is the full form, and `parse(compressor.spec) == compressor`.
"""

from __future__ import annotations

from functools import lru_cache
from types import MappingProxyType
from typing import Any

import msgspec

from fusion.compression.base import Compressor
from fusion.compression.cast import BFloat16, Float16, Uncompressed
from fusion.compression.onebit import OneBit
from fusion.compression.powersgd import PowerSGD
from fusion.compression.quantize import Int8
from fusion.compression.randomk import RandomK
from fusion.compression.terngrad import TernGrad
from fusion.compression.topk import TopK

METHODS: MappingProxyType[str, type[Compressor]] = MappingProxyType(
    {
        method.name: method
        for method in (Uncompressed, Float16, BFloat16, Int8, OneBit, TernGrad, TopK, RandomK, PowerSGD)
    }
)
"""Every method by its name."""


@lru_cache(maxsize=1024)
def parse(spec: str) -> Compressor:
    """The compressor that a specification names.

    Raises:
        ValueError: there is no such method or setting, or a value cannot be used.
    """
    if not isinstance(spec, str):
        raise TypeError(f"a compressor is specified by a string such as 'topk:0.01', not {spec!r}")
    name, _, rest = spec.strip().partition(":")
    method = METHODS.get(name.strip().lower())
    if method is None:
        raise ValueError(f"there is no compressor {name!r}; there are {', '.join(METHODS)}")
    settings: dict[str, Any] = {}
    for number, text in enumerate(rest.split(",") if rest.strip() else ()):
        field, is_named, value = text.partition("=")
        if not is_named:
            field, value = method.__struct_fields__[0] if method.__struct_fields__ else "", text
        field = field.strip()
        if field not in method.__struct_fields__ or (number and not is_named) or field in settings:
            known = ", ".join(method.__struct_fields__) or "none"
            raise ValueError(
                f"{spec!r}: {text.strip()!r} is no setting of {method.name}; its settings: {known}"
            )
        settings[field] = _value(value.strip())
    try:
        return method(**settings)
    except TypeError:
        missing = next(field for field in method.__struct_fields__ if field not in settings)
        raise ValueError(f"{spec!r}: {method.name} needs a {missing}, for example '{name}:0.01'") from None


def _value(text: str) -> Any:
    if text.lower() in ("on", "true", "yes"):
        return True
    if text.lower() in ("off", "false", "no"):
        return False
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def with_feedback(compressor: Compressor, feedback: bool) -> Compressor:
    """The same method and settings with error feedback switched on or off."""
    if not hasattr(compressor, "feedback"):
        return compressor
    return msgspec.structs.replace(compressor, feedback=feedback)
