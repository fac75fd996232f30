"""What ranks tell each other when the cheap path does not settle it, and what follows.

Pure functions: `merge` is associative, so reports combine in a tree; `resolve`
gives every rank the same answer from the same merged report.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from coordinator.messages import Request
from coordinator.tuning import Knobs


class Report(msgspec.Struct):
    """What a rank, or a merged set of ranks, is waiting for."""

    ranks: dict[Request, int]
    """Pending request -> bit mask of the ranks that have it."""
    ages: dict[str, float]
    """Name -> seconds the longest waiting rank has waited."""
    leaving: dict[int, str]
    """Leaving rank -> why."""
    joining: int = 0
    """Bit mask of the ranks that join now."""
    knobs: Knobs | None = None
    """Settings that all ranks are to take."""


class Mismatch(msgspec.Struct, frozen=True):
    """A name under which ranks submitted different things."""

    ranks: int
    """Bit mask of the ranks that submitted it."""
    reason: str


class Resolution(msgspec.Struct, frozen=True):
    """What all ranks do after an exchange."""

    agreed: tuple[Request, ...]
    mismatches: dict[str, Mismatch]
    all_joined: bool = False
    last_joined: int = -1
    """When all have joined: the rank that did so last; of several at once, the highest."""


def merge(left: Report, right: Report) -> Report:
    """Combine two reports; `left` holds the lower ranks and is consumed."""
    for request, ranks in right.ranks.items():
        left.ranks[request] = left.ranks.get(request, 0) | ranks
    for name, age in right.ages.items():
        left.ages[name] = max(age, left.ages.get(name, 0.0))
    left.leaving.update(right.leaving)
    left.joining |= right.joining
    left.knobs = left.knobs or right.knobs
    return left


def resolve(merged: Report, size: int, joined: int = 0, ranks: Sequence[int] | None = None) -> Resolution:
    """Tell requests that all submitters agree on from names they disagree about.

    Args:
        joined: bit mask of the ranks that had joined before.
        ranks: what messages call the ranks.
    """
    variants: dict[str, dict[Request, int]] = {}
    for request, having in merged.ranks.items():
        variants.setdefault(request.name, {})[request] = having
    agreed: list[Request] = []
    mismatches: dict[str, Mismatch] = {}
    for name, forms in variants.items():
        if len(forms) == 1:
            agreed.extend(forms)
            continue
        submitted = 0
        for having in forms.values():
            submitted |= having
        mismatches[name] = Mismatch(submitted, _describe(name, forms, size, ranks))
    return Resolution(
        tuple(agreed),
        mismatches,
        all_joined=merged.joining > 0 and (joined | merged.joining) == (1 << size) - 1,
        last_joined=merged.joining.bit_length() - 1,
    )


def rank_list(mask: int, ranks: Sequence[int] | None = None, most: int = 8) -> str:
    """Ranks of a bit mask in words: "rank 3", "ranks 0, 2, 5"; long lists are cut.

    Args:
        mask: has a bit for each place in the group.
        ranks: what each place is called; default its number.
    """
    places = [place for place in range(mask.bit_length()) if mask >> place & 1]
    named = places if ranks is None else [ranks[place] for place in places]
    if len(named) == 1:
        return f"rank {named[0]}"
    shown = ", ".join(map(str, named[:most]))
    more = f" and {len(named) - most} more" if len(named) > most else ""
    return f"ranks {shown}{more}"


def _describe(name: str, forms: dict[Request, int], size: int, ranks: Sequence[int] | None) -> str:
    fields = [
        field for field in Request.__struct_fields__ if len({_value(request, field) for request in forms}) > 1
    ]
    sides = "; ".join(
        f"{rank_list(having, ranks)}: "
        + ", ".join(f"{_LABELS[field]} {_value(request, field)}" for field in fields)
        for request, having in forms.items()
    )
    return (
        f"ranks disagree about '{name}': {sides}. Submit the same {_and(fields)} under this name on "
        f"all {size} ranks, or use different names"
    )


_LABELS = {
    "name": "name",
    "kind": "operation",
    "dtypes": "dtype",
    "shapes": "shape",
    "op": "reduce op",
    "root_rank": "root rank",
    "prescale": "prescale factor",
    "postscale": "postscale factor",
    "device": "device",
    "codec": "compression",
    "terms": "compression of gradients",
    "region": "shared memory region",
}


def _value(request: Request, field: str) -> Any:
    value = getattr(request, field)
    if field in ("kind", "op"):
        return value.name.lower()
    if field in ("dtypes", "shapes") and len(value) == 1:
        return value[0]
    return value or "none" if field == "terms" else value


def _and(fields: list[str]) -> str:
    return " and ".join(_LABELS[field] for field in fields)


def stalled_names(
    merged: Report, size: int, limit_s: float, joined: int = 0
) -> list[tuple[str, float, int, int]]:
    """Names that waited longer than `limit_s`: (name, age, ranks with it, ranks without)."""
    everyone = ((1 << size) - 1) & ~joined
    found = []
    having: dict[str, int] = {}
    for request, ranks in merged.ranks.items():
        having[request.name] = having.get(request.name, 0) | ranks
    for name, ranks in having.items():
        if merged.ages.get(name, 0.0) >= limit_s:
            found.append((name, merged.ages[name], ranks, everyone & ~ranks))
    return found
