"""The ladder of optimisations as a waterfall: what each rung saves on the rung above.

Test: tests/test_report.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .style import COLORS, GREY, new_figure, set_titles


def ladder_waterfall(rows: Sequence[Mapping[str, Any]], subtitle: str) -> tuple[Figure, Axes]:
    """One bar for each rung, the first on top; hatched is what it saves on the rung above, orange what it adds.

    Args:
        rows: of a record of the benchmark "ladder", in the order of the rungs: `variant`, `latency_ms_p20`, `p50`,
            `p80` and `relative_error`. Of several cases the first is drawn.
    """
    rungs = [row for row in rows if row["case"] == rows[0]["case"]]
    times = [row["latency_ms_p50"] for row in rungs]
    fig, ax = new_figure(9.5, 0.55 * len(rungs) + 1.75)
    above = times[0]
    for level, (row, time) in enumerate(zip(rungs, times, strict=True)):
        ax.barh(level, min(time, above), color=COLORS["blue"], height=0.62)
        kind = {"color": COLORS["sky"], "hatch": "///"} if time <= above else {"color": COLORS["orange"]}
        ax.barh(level, abs(above - time), left=min(time, above), height=0.62, edgecolor="white", **kind)
        spread = [[time - row["latency_ms_p20"]], [row["latency_ms_p80"] - time]]
        ax.errorbar(time, level, xerr=spread, color=COLORS["navy"], capsize=4, lw=1.6)
        words = f"{times[0] / time:.2f}x, error {row['relative_error']:.0e}"
        ax.annotate(
            words, (max(time, above, row["latency_ms_p80"]), level), (8, 0), textcoords="offset points", va="center"
        )
        above = time
    ax.set(yticks=range(len(rungs)), yticklabels=[row["variant"] for row in rungs], xlim=(0, 1.42 * max(times)))
    ax.set(xlabel="latency, ms: median, and p20 to p80 as a line", ylim=(len(rungs) - 0.4, -0.6))
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", visible=False)
    ax.spines["left"].set_color(GREY)
    set_titles(fig, f"{rungs[0]['case']}: {times[0] / times[-1]:.1f} times as fast, rung by rung", subtitle)
    return fig, ax
