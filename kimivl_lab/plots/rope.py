"""RoPE-2D: its angles over the grid, its wavelengths, swapped axes, translated scores, and what rounding does.

Test: tests/test_plots.py.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MultipleLocator, NullLocator

from .position import DARK_TO_LIGHT
from .style import COLORS, COUNTED, GREY, INK, LIGHT, new_figure, set_titles


def phase_maps(slots: Mapping[str, Sequence[tuple[str, np.ndarray]]], title: str) -> tuple[Figure, np.ndarray]:
    """cos of a slot's angle over the grid; one map for each slot.

    Args:
        slots: words of a row of maps -> [(words, (h, w) values)], as many in each row.
    """
    count = len(next(iter(slots.values())))
    height, width = next(iter(slots.values()))[0][1].shape
    fig, axes = new_figure(10, (2.0 * height / width + 0.42) * len(slots) + 1.05, nrows=len(slots), ncols=count)
    for line, (words, maps) in zip(axes, slots.items(), strict=True):
        for ax, (name, values) in zip(line, maps, strict=True):
            ax.imshow(values, cmap=DARK_TO_LIGHT, vmin=-1, vmax=1)
            ax.set(title=name, xticks=[0, width - 1], yticks=[0, height - 1])
            ax.grid(False)
        line[0].set_ylabel(f"{words}\nrow")
    for ax in axes[-1]:
        ax.set_xlabel("column")
    fig.colorbar(axes.flat[0].images[0], ax=axes, label="cos of the angle", ticks=[-1, 0, 1], pad=0.015, aspect=26)
    set_titles(fig, title, COUNTED)
    return fig, axes


def wavelengths(lengths: Sequence[float], sides: Mapping[str, int], half_turn: int, title: str) -> tuple[Figure, Axes]:
    """Patches until a slot's angle has gone full circle, against typical sides of a grid.

    Args:
        lengths: wavelength of theta_i in patches, by i.
        sides: words -> patches, drawn as lines.
        half_turn: a side; slots whose wavelength exceeds twice this never complete half a turn on it: hollow.
    """
    fig, ax = new_figure(9, 4.0)
    values = np.asarray(lengths)
    index = np.arange(len(values))
    slow = values > 2 * half_turn
    ax.vlines(index, 1, values, color=LIGHT, lw=5, zorder=0)
    ax.plot(
        index[~slow],
        values[~slow],
        "o",
        color=COLORS["navy"],
        ms=8,
        label=f"at least half a turn on {half_turn} patches",
    )
    ax.plot(
        index[slow], values[slow], "o", color=COLORS["navy"], mfc="white", mew=2, ms=7.5,
        label=f"less than half a turn on {half_turn} patches",
    )  # fmt: skip
    ax.axhline(2 * half_turn, color=INK, ls=(0, (1, 1.5)), lw=1.8, zorder=1)
    words = f"{2 * half_turn}: half a turn on {half_turn} patches"
    ax.annotate(words, (len(values) - 0.5, 2 * half_turn), (0, 4), textcoords="offset points", ha="right", fontsize=10)
    for words, side in sides.items():
        ax.axhline(side, color=COLORS["orange"], ls=(0, (5, 2)), lw=1.6, zorder=1)
        ax.annotate(words, (len(values) - 0.5, side), (0, 4), textcoords="offset points", ha="right", fontsize=10)
    ax.set_yscale("log")
    ax.set(xlim=(-0.6, len(values) - 0.4), ylim=(3, 1e5), xlabel="i, slots 2i (column) and 2i + 1 (row)")
    ax.set_ylabel("wavelength, patches")
    ax.xaxis.set_major_locator(MultipleLocator(1))
    ax.yaxis.set_major_locator(FixedLocator([10, 100, 1000, 10000]))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    ax.grid(axis="x", visible=False)
    ax.legend(loc="upper left")
    set_titles(fig, title, COUNTED)
    return fig, ax


def swapped_axes(rows: Mapping[str, Sequence[tuple[str, np.ndarray]]], title: str) -> tuple[Figure, np.ndarray]:
    """One slot's values on small grids, written into the cells: right, swapped, and right for the transposed image.

    Args:
        rows: words of a row -> [(words, (h, w) values)], as many in each row; rows may have different grids.
    """
    count = len(next(iter(rows.values())))
    tallest = [max(values.shape[0] for _, values in maps) for maps in rows.values()]
    fig, axes = new_figure(10, 0.31 * sum(tallest) + 0.62 * len(rows) + 0.8, nrows=len(rows), ncols=count,
                           height_ratios=tallest, squeeze=False)  # fmt: skip
    widest = max(values.shape[1] for maps in rows.values() for _, values in maps)
    for line, tall, (words, maps) in zip(axes, tallest, rows.items(), strict=True):
        for ax, (name, values) in zip(line, maps, strict=True):
            ax.imshow(values, cmap=DARK_TO_LIGHT, vmin=-1, vmax=1)
            for (row, column), value in np.ndenumerate(values):
                color = "white" if value < 0.1 else INK
                ax.text(column, row, f"{value:+.1f}", ha="center", va="center", color=color, fontsize=8.5)
            ax.set(title=name, xticks=[], yticks=[], anchor="NW")
            ax.set(xlim=(-0.5, widest - 0.5), ylim=(tall - 0.5, -0.5))
            ax.grid(False)
            for spine in ax.spines.values():
                spine.set_visible(False)
        line[0].set_ylabel(words, loc="top")
    set_titles(fig, title, COUNTED)
    return fig, axes


def score_maps(maps: Mapping[tuple[int, int], np.ndarray], title: str) -> tuple[Figure, Sequence[Axes]]:
    """Scores of one query, set at several places, with one key, set everywhere.

    Args:
        maps: (row, column) of the query -> (h, w) scores.
    """
    height, width = next(iter(maps.values())).shape
    fig, axes = new_figure(10, 8.4 * height / width / len(maps) + 1.75, ncols=len(maps), sharey=True)
    low, high = (pick(float(pick(values.ravel())) for values in maps.values()) for pick in (min, max))
    for ax, ((row, column), values) in zip(axes, maps.items(), strict=True):
        ax.imshow(values, cmap=DARK_TO_LIGHT, vmin=low, vmax=high)
        ax.plot(column, row, "o", ms=11, mfc="none", mec="white", mew=4)
        ax.plot(column, row, "o", ms=11, mfc="none", mec=COLORS["orange"], mew=2.2)
        ax.set(title=f"query at row {row}, column {column}", xlabel="column of the key")
        ax.set(xticks=[0, width - 1], yticks=[0, height - 1])
        ax.grid(False)
    axes[0].set_ylabel("row of the key")
    fig.colorbar(axes[0].images[0], ax=axes, label="score", pad=0.015, aspect=20)
    set_titles(fig, title, COUNTED)
    return fig, axes


def angle_errors(positions: Sequence[int], errors: Mapping[str, Sequence[float]], title: str) -> tuple[Figure, Axes]:
    """Largest error of a factor (cos, sin) against the position, both axes logarithmic.

    Args:
        errors: words -> error at each position, up to four, the worst first; 0 is not drawn.
    """
    fig, ax = new_figure(9.5, 4.6)
    styles = (("orange", "-", 2.4), ("sky", "-", 2.2), ("blue", (0, (5, 2)), 2.2), ("navy", "-", 2.4))
    for (color, style, line_width), (words, values) in zip(styles, errors.items(), strict=False):
        shown = np.where(np.asarray(values) > 0, values, np.nan)
        ax.plot(positions, shown, color=COLORS[color], ls=style, lw=line_width)
        lift = 5 if shown[-1] > 1 else -3
        ax.annotate(words, (positions[-1], shown[-1]), (6, lift), textcoords="offset points", va="center", fontsize=10)
    ax.axhline(2, color=GREY, lw=1.2, ls=(0, (1, 2)))
    ax.annotate("2: the opposite direction", (positions[0], 2), (2, 3), textcoords="offset points", fontsize=10)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set(xlabel="position along an axis, patches", ylabel="largest error of cos or sin")
    ax.set(xlim=(positions[0], positions[-1]), ylim=(1e-8, 6))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    set_titles(fig, title, COUNTED)
    return fig, ax
