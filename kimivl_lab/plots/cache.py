"""Cache policies on real traffic: the hit rate of each bound, and the memory that it holds.

Test: tests/test_plots.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter

from ..lessons.cache_traffic import break_even, rate_words
from .lines import Marks, Row, by_case, case_words, draw_lines, log_axis, mark, recorded_times
from .style import COLORS, COMPUTED, GREY, INK, new_figure, set_titles

POLICIES = {
    "fifo by entries": (COLORS["orange"], "s", (0, (5, 2))),
    "lru by entries": (COLORS["sky"], "^", "-"),
    "lru by bytes": (COLORS["navy"], "o", "-"),
}
_NAMES = {
    "fifo by entries": "first in first out, bounded in entries",
    "lru by entries": "least recently used, bounded in entries",
    "lru by bytes": "least recently used, bounded in bytes",
}


def hit_rates(
    rows: Sequence[Mapping[str, Any]], cases: Mapping[str, str], *, entries: int, mib: int, title: str, subtitle: str
) -> tuple[Figure, np.ndarray]:
    """Hit rate against the most bytes that a policy held; one panel for each traffic, one dot for each bound.

    Args:
        rows: of a record "position_cache".
        cases: the record's case -> its name above the panel, up to six.
        entries: the bound in entries that is ringed.
        mib: the bound in MiB that is drawn as an upright line.
    """
    fig, axes = new_figure(10, 5.9, nrows=-(-len(cases) // 3), ncols=3, sharex=True, sharey=True, squeeze=False)
    for ax in axes.flat[len(cases) :]:
        ax.set_axis_off()
    for ax, (case, name) in zip(axes.flat, cases.items(), strict=False):
        of_case = [row for row in rows if row["case"] == case]
        most = max(row["hit_rate"] for row in of_case)
        ax.axhline(most, color=GREY, ls=(0, (1, 2)), lw=1.4)  # every grid is missed once
        ax.axvline(mib, color=INK, ls=(0, (4, 3)), lw=1.2, label=f"{mib} MiB")
        for variant, (color, marker, style) in POLICIES.items():
            held, rate = _points(of_case, variant)
            ax.plot(held, rate, marker, ls=style, color=color, ms=5.5, lw=1.7, label=_NAMES[variant])
        held, rate = _points([row for row in of_case if row["bound_entries"] == entries], "fifo by entries")
        ax.plot(held, rate, "o", ms=13, mfc="none", mec=INK, mew=1.6, label=f"{entries} entries")
        ax.set(title=name, ylim=(-0.05, 1.09), yticks=[0, 0.25, 0.5, 0.75, 1])
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_locator(FixedLocator([16, 64, 256, 1024]))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    for ax in axes[-1]:
        ax.set_xlabel("most MiB held")
    for ax in axes[:, 0]:
        ax.set_ylabel("hit rate")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower left", ncols=3, columnspacing=1.6)
    set_titles(fig, title, subtitle)
    return fig, axes


def break_even_line(
    compute: float, hit: float, miss: float, rates: Mapping[str, float], title: str, subtitle: str = COMPUTED
) -> tuple[Figure, Axes]:
    """The mean time of a lookup against the hit rate, and the time without a cache.

    Args:
        compute, hit, miss: times in ms: without a cache, of a hit and of a miss.
        rates: words -> hit rate (0 to 1) that is marked on the line.
    """
    fig, ax = new_figure(9, 4.0)
    ax.plot([0, 1], [miss, hit], color=COLORS["navy"], label="with a cache")
    ax.axhline(compute, color=COLORS["orange"], ls=(0, (5, 2)), label="without a cache")
    for words, rate in rates.items():
        time = rate * hit + (1 - rate) * miss
        ax.plot(rate, time, "o", color=COLORS["navy"], ms=8, mec="white", mew=1)
        ax.annotate(f"{words}: {time:.1f} ms", (rate, time), (9, 3), textcoords="offset points")
    if hit < compute < miss:
        even = (miss - compute) / (miss - hit)
        ax.plot(even, compute, "o", ms=13, mfc="none", mec=INK, mew=1.6)
        ax.annotate(f"break-even {even:.0%}", (even, compute), (-4, -20), textcoords="offset points", ha="right")
    ax.set(xlim=(0, 1), ylim=(0, 1.08 * max(miss, compute)), xlabel="hit rate", ylabel="mean time of a lookup, ms")
    ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    ax.legend(loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=2)
    set_titles(fig, title, subtitle)
    return fig, ax


def hit_and_miss(rows: Sequence[Row], *, title: str, subtitle: str) -> tuple[Figure, Axes]:
    """One line for each case: the time without a cache, of a miss and of a hit, the hit's floor, and the break-even.

    Args:
        rows: of a record "position", with the variants "adaptive", "cache_miss" and "cache_hit".
    """
    names = {"cache_hit": "hit", "adaptive": "no cache", "cache_miss": "miss"}
    styles = {
        "cache_hit": mark("navy", "o", 8),
        "adaptive": mark("sky", "^", 8.5),
        "cache_miss": mark("orange", "s", 8),
    }
    cases = by_case(rows, names)
    floors = [case["cache_hit"]["floor_ms"] for case in cases.values()]
    marks = [Marks("byte floor of the hit", floors, {"color": INK, "marker": "|", "ms": 17, "mew": 2.6})]
    marks += [recorded_times(cases, name, words, styles[name]) for name, words in names.items()]
    rates = [break_even(*(case[name]["latency_ms_p50"] for name in ("adaptive", *_PAIR))) for case in cases.values()]
    fig, ax = new_figure(10, 0.52 * len(cases) + 2.15)
    labels = [f"{case_words(name)}, {case['adaptive']['patches']:,.0f} patches" for name, case in cases.items()]
    notes = [rate_words(rate) for rate in rates]
    draw_lines(ax, labels, marks, notes=notes, heading="break-even\nhit rate", lanes=0.16)
    log_axis(ax, "time, ms")
    set_titles(fig, title, subtitle)
    return fig, ax


_PAIR = ("cache_hit", "cache_miss")


def _points(rows: Sequence[Mapping[str, Any]], variant: str) -> tuple[list[float], list[float]]:
    """(most MiB held, hit rate) of one policy's bounds, ascending."""
    points = sorted((row["largest_mib"], row["hit_rate"]) for row in rows if row["variant"] == variant)
    return [held for held, _ in points], [rate for _, rate in points]
