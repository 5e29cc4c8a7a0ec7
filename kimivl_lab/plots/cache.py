"""Cache policies on real traffic: the hit rate of each bound, and the memory that it holds.

Test: tests/test_plots.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter

from .style import COLORS, GREY, INK, new_figure, set_titles

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


def _points(rows: Sequence[Mapping[str, Any]], variant: str) -> tuple[list[float], list[float]]:
    """(most MiB held, hit rate) of one policy's bounds, ascending."""
    points = sorted((row["largest_mib"], row["hit_rate"]) for row in rows if row["variant"] == variant)
    return [held for held, _ in points], [rate for _, rate in points]
