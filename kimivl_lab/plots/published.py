"""What others published against what is predicted for the same case, with the misses named.

Test: tests/test_plots.py.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, NullLocator

from .lines import mark
from .style import COLORS, GREY, INK, new_figure, set_titles

if TYPE_CHECKING:
    from ..measure.published import PublishedCase

_VERDICTS = {
    "right": ("prediction right", mark("navy", "o", 8)),
    "open": ("prediction open: its range holds 1", mark("sky", "s", 7)),
    "miss": ("miss", mark("orange", "D", 8)),
}
_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


def predicted_against_published(
    panels: Mapping[str, tuple[str, Sequence["PublishedCase"]]], *, title: str, subtitle: str
) -> tuple[Figure, Sequence[Axes]]:
    """One panel a question: across, the predicted range; up, what was published; misses carry their case.

    Args:
        panels: title of the panel -> (label of its x axis, cases). Both axes: above 1 the new way is faster.
    """
    fig, axes = new_figure(5.6 * len(panels) + 0.6, 5.6, ncols=len(panels), squeeze=False)
    for ax, (words, (label, cases)) in zip(axes[0], panels.items(), strict=True):
        ax.set_xscale("log")
        ax.set_yscale("log")
        ends = [min(case.low for case in cases), max(case.high for case in cases), 1]
        low, high = min(ends) / 1.4, max(ends) * 1.4
        published = [case.published for case in cases]
        bottom, top = min([*published, 0.95]) / 1.06, max([*published, 1.05]) * 1.06
        for x, y in ((low, bottom), (1, 1)):  # where the prediction and the published number agree
            width, height = (1 - low, 1 - bottom) if x == low else (high - 1, top - 1)
            ax.add_patch(Rectangle((x, y), width, height, fc=COLORS["sand"], alpha=0.45, lw=0, zorder=0))
        ax.axhline(1, color=INK, lw=1.2)
        ax.axvline(1, color=INK, lw=1.2)
        for verdict, (meaning, style) in _VERDICTS.items():
            of_verdict = [case for case in cases if case.verdict == verdict]
            if not of_verdict:
                continue
            y = [case.published for case in of_verdict]
            ax.hlines(y, [case.low for case in of_verdict], [case.high for case in of_verdict], color=GREY, lw=1.1)
            middle = [np.sqrt(case.low * case.high) for case in of_verdict]
            ax.plot(middle, y, ls="", label=f"{meaning}: {len(of_verdict)}", zorder=3, **style)
        for number, case in enumerate((case for case in cases if case.verdict == "miss"), 1):
            at = np.sqrt(case.low * case.high), case.published
            ax.annotate(str(number), at, (0, 8), textcoords="offset points", ha="center", fontsize=10)
            ax.plot([], [], " ", label=f"{number}: {case.words}")
        ax.set(xlim=(low, high), ylim=(bottom, top), title=words, xlabel=label)
        ax.xaxis.set_major_locator(FixedLocator([tick for tick in _TICKS if low <= tick <= high]))
        ax.yaxis.set_major_locator(FixedLocator([0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.4, 1.6, 1.8, 2, 3]))
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.14), handletextpad=0.3, fontsize=9)
    axes[0][0].set_ylabel("published: times as fast")
    set_titles(fig, title, subtitle)
    return fig, axes[0]
