"""The learned position table and its interpolation: what it has learned, the weights, and four ways to get it wrong.

Test: tests/test_plots.py.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogFormatterSciNotation, MultipleLocator

from .style import COLORS, COMPUTED, GREY, INK, LIGHT, new_figure, set_titles

Cell = tuple[float, float]

DARK_TO_LIGHT = LinearSegmentedColormap.from_list(
    "dark to light", [COLORS[name] for name in ("navy", "blue", "sky", "sand")]
)
_LIGHT_TO_DARK = LinearSegmentedColormap.from_list(
    "light to dark", ["white", COLORS["sand"], COLORS["orange"], "#8a3c00", "#2e1400"]
)
_SIGNED = LinearSegmentedColormap.from_list("below to above 0", [COLORS["orange"], "white", COLORS["navy"]])
_LIGHTEST = 1e-3  # errors below it share one shade
_LINES = ((COLORS["navy"], "-"), (COLORS["orange"], (0, (5, 2))), (COLORS["sky"], (0, (1.2, 1.2))))


def similarity_maps(rows: Mapping[str, Sequence[tuple[Cell, np.ndarray]]], title: str) -> tuple[Figure, np.ndarray]:
    """How similar each position's embedding is to that of one chosen position; one map for each choice.

    Args:
        rows: words -> [((row, column) of the chosen position, (h, w) cosine similarities)], as many in each row.
    """
    count = len(next(iter(rows.values())))
    shapes = [maps[0][1].shape for maps in rows.values()]
    heights = [8.1 / count * h / w for h, w in shapes]
    fig, axes = new_figure(
        10, sum(heights) + 0.32 * len(rows) + 1.25, nrows=len(rows), ncols=count, height_ratios=heights, squeeze=False
    )
    lowest = min(float(values.min()) for maps in rows.values() for _, values in maps)
    for line, (words, maps) in zip(axes, rows.items(), strict=True):
        for ax, ((row, column), values) in zip(line, maps, strict=True):
            ax.imshow(values, cmap=DARK_TO_LIGHT, vmin=lowest, vmax=1)
            ax.plot(column, row, "o", ms=11, mfc="none", mec="white", mew=4)
            ax.plot(column, row, "o", ms=11, mfc="none", mec=COLORS["orange"], mew=2.2)
            ax.set(xticks=_ends(values.shape[1]), yticks=_ends(values.shape[0]))
            ax.grid(False)
        line[0].set(ylabel=f"{words}\nrow")
    for ax in axes[-1]:
        ax.set_xlabel("column")
    fig.colorbar(axes[0, 0].images[0], ax=axes, label="cosine similarity to the ringed position", pad=0.015, aspect=36)
    set_titles(fig, title, COMPUTED)
    return fig, axes


def kernel_and_centres(
    distance: np.ndarray,
    kernels: Mapping[str, np.ndarray],
    centres: Mapping[str, np.ndarray],
    in_size: int,
    title: str,
) -> tuple[Figure, Sequence[Axes]]:
    """Left, the weight of a tap against its distance; right, where the output positions fall on the input's axis.

    Args:
        distance: in table cells, ascending.
        kernels: words -> weight at each distance, up to three.
        centres: words -> source coordinate of each output position, in table cells (0 = centre of the first cell).
        in_size: cells of the input's axis.
    """
    fig, (left, right) = new_figure(10, 3.9, ncols=2, width_ratios=(1.15, 1))
    for (color, style), (words, weight) in zip(_LINES, kernels.items(), strict=False):
        left.plot(distance, weight, color=color, ls=style, label=words)
    left.axhline(0, color=GREY, lw=0.9)
    left.set(xlabel="distance of a tap, table cells", ylabel="weight", xlim=(-2.2, 2.2))
    left.xaxis.set_major_locator(MultipleLocator(1))
    left.legend(
        loc="lower left", bbox_to_anchor=(-0.03, 1), ncols=3, columnspacing=1.0, handlelength=1.7, handletextpad=0.4
    )

    top = len(centres)
    for cell in range(in_size):
        face = LIGHT if cell % 2 else "white"
        right.add_patch(Rectangle((cell - 0.5, top + 0.04), 1, 0.48, facecolor=face, edgecolor=GREY, linewidth=0.8))
        right.text(cell, top + 0.28, f"{cell}", ha="center", va="center", color=GREY)
    for at, (words, positions) in enumerate(centres.items()):
        y = top - 0.65 - at
        right.plot([-0.5, in_size - 0.5], [y, y], color=GREY, lw=0.9)
        right.vlines(positions, y, top + 0.04, color=LIGHT, lw=0.9, zorder=0)
        face = COLORS["navy"] if at == 0 else COLORS["orange"]
        right.plot(positions, [y] * len(positions), "os"[at % 2], color=face, ms=8, mec="white", mew=1)
        right.text(-0.5, y - 0.17, words, va="top", fontsize=10.5, bbox=_PLAIN)
    right.set(xlim=(-0.6, in_size - 0.4), ylim=(-0.3, top + 0.6), yticks=[], xticks=range(in_size))
    right.set_xlabel("source coordinate, table cells")
    right.grid(False)
    right.spines["left"].set_visible(False)
    set_titles(fig, title, COMPUTED)
    return fig, (left, right)


def matrix_line(
    matrix: np.ndarray, line: int, centre: float, curve: tuple[np.ndarray, np.ndarray], title: str
) -> tuple[Figure, Sequence[Axes]]:
    """One line of an interpolation matrix worked out: left, where its weights come from; right, where they stand.

    Args:
        matrix: (out, in) weights.
        line: which line is worked out.
        centre: its source coordinate, in table cells; the line reads the two cells on each side of it.
        curve: (distances in table cells, weights) of the weight function.
    """
    size, before = matrix.shape[1], int(np.floor(centre))
    taps = range(before - 1, before + 3)
    fig, (left, right) = new_figure(10, 4.3, ncols=2, width_ratios=(1, 1.1))
    left.plot(centre + curve[0], curve[1], color=COLORS["sky"], zorder=1)
    left.axhline(0, color=GREY, lw=0.9)
    left.axvline(centre, color=INK, ls=(0, (4, 3)), lw=1.3)
    for cell in taps:
        distance = cell - centre
        weight = float(np.interp(distance, *curve))
        left.plot([cell, cell], [0, weight], color=COLORS["navy"], lw=2.4)
        left.plot(cell, weight, "o", color=COLORS["navy"], ms=8)
        side, shift = ("right", -0.12) if distance < 0 else ("left", 0.17)
        height = 0.97 if weight > 0.5 else 0.2 + 0.26 * (2 - abs(distance))  # beside the curve, one above the other
        left.plot([cell, cell + shift], [weight, height], color=GREY, lw=0.8)
        words = f"{weight:+.3f}\ndistance {abs(distance):.1f}"
        left.text(cell + shift, height, words, fontsize=10, ha=side, va="bottom")
    left.annotate(f"position {line} lies at {centre:g}", (centre, 1.3), (-6, 0), textcoords="offset points", ha="right")
    left.set(xlim=(before - 2.8, before + 3.6), ylim=(-0.2, 1.42), xticks=list(taps), ylabel="weight")
    left.set_xlabel("cell of the table")
    left.grid(False)

    limit = float(abs(matrix).max())
    right.imshow(matrix, cmap=_SIGNED, vmin=-limit, vmax=limit, aspect="auto")
    for row, column in np.ndindex(*matrix.shape):
        if matrix[row, column]:
            strong = abs(matrix[row, column]) > 0.6 * limit
            style = {"color": "white" if strong else INK, "fontweight": "bold" if row == line else "normal"}
            right.text(column, row, f"{matrix[row, column]:.3f}", ha="center", va="center", fontsize=9, **style)
    right.add_patch(Rectangle((-0.48, line - 0.48), size - 0.04, 0.96, facecolor="none", edgecolor=INK, linewidth=2))
    right.set(xticks=range(size), yticks=range(len(matrix)), xlabel="cell of the table")
    right.set_ylabel("output position (line of A)")
    right.grid(False)
    set_titles(fig, title, COMPUTED)
    return fig, (left, right)


def fault_maps(errors: Mapping[str, np.ndarray], title: str) -> tuple[Figure, Sequence[Axes]]:
    """Where a faulty resampling is wrong: relative error of each patch's embedding, one map for each fault.

    Args:
        errors: words -> (h, w) error of each patch, relative to the norm of the right embedding.
    """
    fig, axes = new_figure(10, 3.35, ncols=len(errors), sharey=True)
    ceiling = max(float(values.max()) for values in errors.values())
    for ax, (words, values) in zip(axes, errors.items(), strict=True):
        ax.imshow(np.maximum(values, _LIGHTEST), cmap=_LIGHT_TO_DARK, norm=LogNorm(_LIGHTEST, ceiling))
        ax.set(title=words, xlabel="column", xticks=_ends(values.shape[1]), yticks=_ends(values.shape[0]))
        ax.grid(False)
        for spine in ax.spines.values():
            spine.set(visible=True, color=LIGHT)
    axes[0].set_ylabel("row")
    bar = fig.colorbar(axes[0].images[0], ax=axes, label="relative error of a patch", pad=0.015, aspect=22)
    bar.ax.yaxis.set_major_formatter(LogFormatterSciNotation())
    bar.ax.minorticks_off()
    set_titles(fig, title, COMPUTED)
    return fig, axes


def error_by_side(
    sides: Sequence[int], errors: Mapping[str, Sequence[float]], title: str, note: str
) -> tuple[Figure, Axes]:
    """Relative error of whole operators against the side of the grid; one dot for each side; 0 is not drawn.

    Args:
        sides: of square grids, ascending.
        errors: words -> error at each side, up to three.
        note: for the subtitle.
    """
    fig, ax = new_figure(9, 4.1)
    for (color, _), marker, (words, values) in zip(_LINES, "os^", errors.items(), strict=False):
        shown = np.where(np.asarray(values) > 0, values, np.nan)
        ax.plot(sides, shown, marker, color=color, ms=4, mew=0, label=words)
    ax.set_yscale("log")
    ax.set(xlabel="side of a square grid, patches", ylabel="relative error of the embedding", xlim=(0, sides[-1] + 2))
    ax.axhline(2.0**-24, color=INK, ls=(0, (4, 3)), lw=1.3)
    words = "dashed: 2^-24, half a unit in float32's last place"
    ax.annotate(words, (sides[-1], 1.6e-8), ha="right", va="bottom", fontsize=10)
    ax.set_ylim(1.5e-8, 1e-5)
    ax.xaxis.set_major_locator(MultipleLocator(sides[-1] // 8))
    ax.legend(loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=3, markerscale=2, handletextpad=0.2)
    set_titles(fig, title, note)
    return fig, ax


def _ends(size: int) -> list[int]:
    return [0, size - 1]


_PLAIN = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"}
