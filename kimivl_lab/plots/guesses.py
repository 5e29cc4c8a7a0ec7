"""A guess, a prediction and a measurement of the same thing, one line each, on a logarithmic scale."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from ..lessons.guesses import Comparison
from .style import COLORS, INK, LIGHT, new_figure, set_titles

_MARKS = (("your guess", "D", COLORS["orange"]), ("predicted", "s", COLORS["sky"]), ("measured", "o", COLORS["navy"]))


def guess_plot(comparisons: Sequence[Comparison], *, title: str, subtitle: str) -> tuple[Figure, Axes]:
    """One line for each comparison, with a mark for the guess, the prediction and the measurement.

    A number that is missing has no mark. All comparisons have one unit.
    Use it behind `lessons.guesses.compare`, which prints the same numbers.
    """
    fig, ax = new_figure(9, 0.55 * len(comparisons) + 1.9)
    y = np.arange(len(comparisons))[::-1]
    for at, one in zip(y, comparisons, strict=True):
        guessed = one.guess.value if isinstance(one.guess.value, int | float) else None
        values = (guessed, one.predicted, one.measured)
        known = [value for value in values if value is not None]
        ax.hlines(at, min(known, default=1), max(known, default=1), color=LIGHT, lw=3, zorder=1)
        for (name, marker, color), value in zip(_MARKS, values, strict=True):
            label = name if at == y[0] or name not in ax.get_legend_handles_labels()[1] else None
            if value is not None:
                ax.plot(value, at, marker, color=color, mec=INK, mew=0.8, ms=10, ls="none", label=label)
    units = {one.guess.unit for one in comparisons}
    ax.set(yticks=y, yticklabels=[one.guess.quantity for one in comparisons], xscale="log", xlabel=", ".join(units))
    ax.set_ylim(-0.6, len(comparisons) - 0.4)
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.margins(x=0.12)
    ax.grid(axis="y", visible=False)
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.28), ncols=3)
    set_titles(fig, title, subtitle)
    return fig, ax
