"""Recorded times: beside their byte floor, which is only moving what must be moved, and rung by rung of the ladder.

Test: tests/test_plots.py, tests/test_report.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .lines import Marks, Row, by_case, case_words, draw_lines, log_axis, mark, recorded_times
from .style import COLORS, GREY, INK, name_lines, new_figure, set_titles

_REFERENCE, _BEST = mark("orange", "s", 8), mark("navy", "o", 8)
_OTHERS = (mark("sky", "^", 8.5), mark("sand", "v", 8.5), mark("blue", "D", 7))
_FLOOR = {"color": INK, "marker": "|", "ms": 21, "mew": 2.6}


def recorded_on(origin: Mapping[str, Any], note: str = "") -> str:
    """The subtitle of a recorded measurement: its device, its date, and how it was measured."""
    parts = [str(origin["device"]), str(origin["date"])[:10], note]
    return "  ·  ".join(part for part in parts if part)


def times_over_floor(
    rows: Sequence[Row],
    variants: Mapping[str, str],
    *,
    reference: str,
    best: str,
    title: str,
    subtitle: str,
    predicted: Mapping[str, float] | None = None,
) -> tuple[Figure, Axes]:
    """One line for each case, a mark for each variant at its median with p20 to p80, and the floor as an upright tick.

    Args:
        rows: of a record with `latency_ms_*` and `floor_ms`; cases are drawn by their number of patches.
        variants: the record's variant -> its name in the legend, up to five, in the legend's order.
        reference, best: variants; how many times faster `best` is stands at the right.
        predicted: variant -> its time over the floor as its bytes alone predict it; drawn as a hollow mark.
    """
    cases, predicted = by_case(rows, variants), predicted or {}
    floors = np.array([case[reference]["floor_ms"] for case in cases.values()])
    marks, others = [Marks("byte floor", floors, _FLOOR)], iter(_OTHERS)
    for name, words in variants.items():
        style = {reference: _REFERENCE, best: _BEST}.get(name) or next(others)
        expected = predicted[name] * floors if name in predicted else None
        marks.append(recorded_times(cases, name, words, style, expected=expected))
    ratios = [case[reference]["latency_ms_p50"] / case[best]["latency_ms_p50"] for case in cases.values()]
    fig, ax = new_figure(10, 0.46 * len(cases) + 2.15)
    draw_lines(
        ax,
        [f"{case_words(name)}, {case[reference]['patches']:,.0f} patches" for name, case in cases.items()],
        marks,
        notes=[f"{ratio:.1f}x" for ratio in ratios],
        heading=f"{variants[reference]}\n/ {variants[best]}",
        expected="predicted from its bytes",
    )
    log_axis(ax, "time, ms")
    set_titles(fig, title, subtitle)
    return fig, ax


def ladder_waterfall(rows: Sequence[Row], subtitle: str) -> tuple[Figure, Axes]:
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
    name_lines(ax)
    ax.spines["left"].set_color(GREY)
    set_titles(fig, f"{rungs[0]['case']}: {times[0] / times[-1]:.1f} times as fast, rung by rung", subtitle)
    return fig, ax
