"""Recorded times beside their byte floor: how far each implementation is from only moving what it must.

Test: tests/test_plots.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .lines import Marks, Row, by_case, case_words, draw_lines, log_axis, mark, recorded_times
from .style import INK, new_figure, set_titles

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
