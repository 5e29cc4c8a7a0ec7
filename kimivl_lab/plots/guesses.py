"""A guess, a prediction and a measurement of the same thing, one line each, on a logarithmic scale.

Test: tests/test_lessons.py.
"""

from collections.abc import Sequence
from math import nan

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..lessons.guesses import Comparison
from .lines import Marks, draw_lines, log_axis, mark
from .style import new_figure, set_titles


def guess_plot(comparisons: Sequence[Comparison], *, title: str, subtitle: str) -> tuple[Figure, Axes]:
    """One line for each comparison, with a mark for the guess, the prediction and the measurement.

    A number that is missing has no mark. All comparisons have one unit.
    Use it behind `lessons.guesses.compare`, which prints the same numbers.
    """
    columns = {  # matplotlib draws no mark where there is no number
        "your guess": [one.guess.value if isinstance(one.guess.value, int | float) else nan for one in comparisons],
        "predicted": [nan if one.predicted is None else one.predicted for one in comparisons],
        "measured": [nan if one.measured is None else one.measured for one in comparisons],
    }
    styles = mark("orange", "D", 10), mark("sky", "s", 10), mark("navy", "o", 10)
    marks = [Marks(name, values, style) for (name, values), style in zip(columns.items(), styles, strict=True)]
    fig, ax = new_figure(9, 0.55 * len(comparisons) + 1.9)
    draw_lines(ax, [one.guess.quantity for one in comparisons], marks)
    log_axis(ax, ", ".join({one.guess.unit for one in comparisons}), ticks=(1, 2, 5))
    ax.margins(x=0.12)
    set_titles(fig, title, subtitle)
    return fig, ax
