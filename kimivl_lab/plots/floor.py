"""Recorded times beside their byte floor: how far each implementation is from only moving what it must."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from ..datasets import WORKLOADS
from .style import COLORS, GREY, INK, LIGHT, new_figure, set_titles

_REFERENCE, _BEST = (COLORS["orange"], "s", 8), (COLORS["navy"], "o", 8)
_OTHERS = ((COLORS["sky"], "^", 8.5), (COLORS["sand"], "v", 8.5), (COLORS["blue"], "D", 7))


def recorded_on(origin: Mapping[str, Any], note: str = "") -> str:
    """The subtitle of a recorded measurement: its device, its date, and how it was measured."""
    parts = [str(origin["device"]), str(origin["date"])[:10], note]
    return "  ·  ".join(part for part in parts if part)


def times_over_floor(
    rows: Sequence[Mapping[str, Any]],
    variants: Mapping[str, str],
    *,
    reference: str,
    best: str,
    title: str,
    subtitle: str,
    predicted: Mapping[str, float] | None = None,
) -> tuple[Figure, Axes]:
    """One line a case, one mark a variant at its median with p20 to p80, and the floor as an upright tick.

    Args:
        rows: of a record with `latency_ms_*` and `floor_ms`; cases are drawn by their number of patches.
        variants: the record's variant -> its name in the legend, up to five, in the legend's order.
        reference, best: variants; how many times faster `best` is stands at the right.
        predicted: variant -> its time over the floor as its bytes alone predict it; drawn as a hollow mark.
    """
    by_case: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["patches"]):
        by_case.setdefault(row["case"], {})[row["variant"]] = row
    fig, ax = new_figure(10, 0.46 * len(by_case) + 2.15)
    y = np.arange(len(by_case))[::-1]
    floors = [case[reference]["floor_ms"] for case in by_case.values()]
    slowest = [max(case[name]["latency_ms_p50"] for name in variants) for case in by_case.values()]
    ax.hlines(y, floors, slowest, color=LIGHT, lw=5, zorder=0)
    ax.plot(floors, y, "|", color=INK, ms=21, mew=2.6, label="byte floor")
    others = iter(_OTHERS)
    for name, words in variants.items():
        color, marker, size = {reference: _REFERENCE, best: _BEST}.get(name) or next(others)
        timed = [case[name] for case in by_case.values()]
        p20, p50, p80 = (np.array([row[f"latency_ms_{p}"] for row in timed]) for p in ("p20", "p50", "p80"))
        ax.hlines(y, p20, p80, color=INK, lw=1.3, zorder=3)
        ax.plot(p50, y, marker, color=color, ms=size, mec=INK, mew=0.9, label=words, zorder=4)
        if predicted and name in predicted:
            expected = predicted[name] * np.array(floors)
            ax.plot(expected, y, marker, mfc="none", ms=size + 3, mec=GREY, mew=1.5, zorder=2)
    if predicted:
        ax.plot([], [], "o", mfc="none", mec=GREY, mew=1.5, ms=10, label="predicted from its bytes")
    for at, case in zip(y, by_case.values(), strict=True):
        ratio = case[reference]["latency_ms_p50"] / case[best]["latency_ms_p50"]
        ax.annotate(f"{ratio:.1f}x", (1, at), (8, 0), ("axes fraction", "data"), "offset points", va="center")
    words = f"{variants[reference]}\n/ {variants[best]}"
    ax.annotate(words, (1, 0), (8, -4), "axes fraction", "offset points", fontsize=9.5, va="top")
    ax.set(yticks=y, yticklabels=[_case_words(name, case, reference) for name, case in by_case.items()])
    ax.set(ylim=(-0.6, len(y) - 0.4), xlabel="time, ms")
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)
    ax.legend(loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=6, columnspacing=1.3, handletextpad=0.3)
    set_titles(fig, title, subtitle)
    return fig, ax


def _case_words(name: str, case: Mapping[str, Mapping[str, Any]], variant: str) -> str:
    """A case's name for people, with its patches: "8 of receipts" -> "8 receipt scans, 34,232 patches"."""
    count, of, workload = name.partition(" of ")
    words = f"{count} {WORKLOADS[workload]}" if of else name.replace("x", " x ")
    return f"{words}, {case[variant]['patches']:,.0f} patches"
