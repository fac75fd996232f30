"""Plots of what was measured, as PNG files beside the JSON. Needs matplotlib, the extra `bench`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

Result = dict[str, Any]

plt.switch_backend("Agg")

OURS, PEER, LIMIT = "#1f77b4", "#b0b0b0", "#2ca02c"


def bars(target: Path, results: Sequence[Result]) -> None:
    """One panel a piece of work, one bar a contestant, from the fastest down; whiskers span the rounds."""
    figure, axes = plt.subplots(len(results), 1, figsize=(8, 2.6 * len(results)), squeeze=False)
    for axis, result in zip(axes[:, 0], results, strict=True):
        ordered = sorted(result["series"].items(), key=lambda item: -item[1]["median_ms"])
        names = [name for name, _ in ordered]
        medians = [found["median_ms"] for _, found in ordered]
        low = [found["median_ms"] - min(found["round_medians_ms"]) for _, found in ordered]
        high = [max(found["round_medians_ms"]) - found["median_ms"] for _, found in ordered]
        axis.barh(names, medians, xerr=[low, high], color=[_color(name) for name in names], capsize=2)
        for index, median in enumerate(medians):
            axis.text(median, index, f" {median:.3g}", va="center", fontsize=8)
        for key, style in (("max_ms", "-"), ("sum_ms", "--")):
            if key in result:
                axis.axvline(
                    result[key], color=LIMIT, linestyle=style, label=f"{key[:3]} of compute, communication"
                )
                axis.legend(fontsize=7)
        axis.set_title(f"{result['work']}, {result['ranks']} ranks", fontsize=9, loc="left")
        axis.set_xlabel("ms, median of rounds", fontsize=8)
        axis.tick_params(labelsize=8)
    _save(figure, target)


def over_sizes(target: Path, results: Sequence[Result]) -> None:
    """Latency over the size of one tensor."""
    figure, axis = plt.subplots(figsize=(8, 4.5))
    swept = [result for result in results if result["how"] == "back to back"]
    for name in swept[0]["series"]:
        points = [(result["nbytes"], result["series"][name]["median_ms"]) for result in swept]
        axis.plot(*zip(*points, strict=True), marker="o", label=name)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("bytes of the tensor")
    axis.set_ylabel("ms, submission to result")
    axis.set_title(f"One all-reduce after the other, {swept[0]['ranks']} ranks", fontsize=9, loc="left")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    _save(figure, target)


def over_ranks(target: Path, results: Sequence[Result]) -> None:
    """Registration over the number of ranks: what grows, and what does not."""
    figure, (messages, compute) = plt.subplots(1, 2, figsize=(9, 3.6))
    for how in ("same order", "different orders"):
        points = [result for result in results if result.get("how") == how]
        ranks = [result["ranks"] for result in points]
        messages.plot(ranks, [result["messages_deep"] for result in points], marker="o", label=how)
        compute.plot(ranks, [result["rank0_us_per_tensor"] for result in points], marker="o", label=how)
    messages.set_ylabel("messages, one after the other")
    compute.set_ylabel("microseconds of rank 0 a tensor")
    for axis in (messages, compute):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("ranks")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    _save(figure, target)


def _color(name: str) -> str:
    if "ours" in name:
        return OURS
    return LIMIT if name.startswith(("memcpy", "raw socket", "compute")) else PEER


def _save(figure: Any, target: Path) -> None:
    figure.tight_layout()
    figure.savefig(target, dpi=120)
    plt.close(figure)
