"""Cases as lines and variants as marks with whiskers: the chart of every recorded comparison.

Test: tests/test_plots.py.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator

from ..datasets import WORKLOADS
from .style import COLORS, GREY, INK, LIGHT, name_lines

Row: TypeAlias = Mapping[str, Any]
Cases: TypeAlias = Mapping[str, Mapping[str, Row]]  # case -> variant -> row


@dataclass(frozen=True)
class Marks:
    """One mark on each line, from the top down; NaN leaves a line without one.

    Attributes:
        label: in the legend; "" for none.
        middle: where the marks stand.
        style: of `Axes.plot` (see `mark`).
        low, high: the ends of the whiskers; None for none.
        expected: where the marks were predicted; drawn hollow.
    """

    label: str
    middle: Sequence[float] | np.ndarray
    style: Mapping[str, Any]
    low: Sequence[float] | np.ndarray | None = None
    high: Sequence[float] | np.ndarray | None = None
    expected: Sequence[float] | np.ndarray | None = None


def mark(color: str, marker: str, size: float) -> dict[str, Any]:
    """The style of a filled mark; `color` is a name of `COLORS`."""
    return {"color": COLORS[color], "marker": marker, "ms": size, "mec": INK, "mew": 0.9}


def by_case(rows: Sequence[Row], variants: Collection[str]) -> dict[str, dict[str, Row]]:
    """The rows of the named variants by case, the cases in the order of their patches."""
    found: dict[str, dict[str, Row]] = {}
    for row in sorted(rows, key=lambda row: row["patches"]):
        if row["variant"] in variants:
            found.setdefault(row["case"], {})[row["variant"]] = row
    return found


def recorded_times(
    cases: Cases, variant: str, label: str, style: Mapping[str, Any], *, over: Any = 1.0, expected: Any = None
) -> Marks:
    """The medians of a variant with whiskers from p20 to p80, in ms, or in units of `over` (a number for each case)."""
    p20, p50, p80 = (
        np.array([case[variant][f"latency_ms_{percentile}"] for case in cases.values()]) / over
        for percentile in ("p20", "p50", "p80")
    )
    return Marks(label, p50, style, p20, p80, expected)


def case_words(name: str) -> str:
    """A case for people: "8 of receipts" gives "8 receipt scans", "6 of 12x12" gives "6 of 12 x 12"."""
    count, _, workload = name.partition(" of ")
    return f"{count} {WORKLOADS[workload]}" if workload in WORKLOADS else re.sub(r"(\d)x(\d)", r"\1 x \2", name)


def draw_lines(
    ax: Axes,
    labels: Sequence[str],
    marks: Sequence[Marks],
    *,
    notes: Sequence[str] = (),
    heading: str = "",
    expected: str = "predicted",
    lanes: float = 0.0,
    stem: float | None = None,
) -> None:
    """One line for each label, from the top down, with every variant's mark on it.

    Args:
        notes: what stands right of each line, such as a ratio; `heading` says below them what they are.
        expected: the legend's word for hollow marks.
        lanes: distance between the variants of one line, where their marks would hide each other.
        stem: from where a thick bar leads to each mark.
    """
    y = np.arange(len(labels))[::-1]
    for at in y:
        if not lanes:
            ax.axhline(at, color=LIGHT, lw=4, zorder=0)
        elif at % 2:
            ax.axhspan(at - 0.5, at + 0.5, color=LIGHT, alpha=0.35, lw=0, zorder=0)
    for place, one in enumerate(marks):
        lane = y - lanes * (place - (len(marks) - 1) / 2)
        if stem is not None:
            ax.hlines(lane, stem, one.middle, color=one.style["color"], lw=3, zorder=2)
        if one.low is not None and one.high is not None:
            ax.hlines(lane, one.low, one.high, color=INK, lw=1.4, zorder=3)
        if one.expected is not None:
            hollow: dict[str, Any] = {"mfc": "none", "mec": GREY, "mew": 1.5, "ms": one.style["ms"] + 3}
            ax.plot(one.expected, lane, ls="none", zorder=2, marker=one.style["marker"], **hollow)
        ax.plot(one.middle, lane, ls="none", zorder=4, label=one.label or None, **one.style)
    if any(one.expected is not None for one in marks):
        ax.plot([], [], "o", mfc="none", mec=GREY, mew=1.5, ms=10, label=expected)
    for at, note in zip(y, notes, strict=False):
        ax.annotate(note, (1, at), (8, 0), ("axes fraction", "data"), "offset points", va="center")
    ax.annotate(heading, (1, 0), (8, -4), "axes fraction", "offset points", fontsize=9.5, va="top")
    ax.set(yticks=y, yticklabels=labels, ylim=(-0.6, len(y) - 0.4))
    name_lines(ax)
    if any(one.label for one in marks):
        ax.legend(loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=6, columnspacing=1.3, handletextpad=0.3)


def log_axis(ax: Axes, label: str, ticks: Sequence[int] = (1, 3)) -> None:
    """A logarithmic x axis of plain numbers, with ticks at these multiples of the powers of ten."""
    ax.set_xscale("log")
    ax.set_xlabel(label)
    ax.xaxis.set_major_locator(LogLocator(subs=ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
