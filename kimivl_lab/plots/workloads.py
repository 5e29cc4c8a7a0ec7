"""What real images cost: token counts of workloads, the limit and what passes it, the price of padding.

Test: tests/test_plots.py.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

from ..geometry import PATCH_SIZE
from .style import COLORS, COUNTED, INK, LIGHT, name_lines, new_figure, set_titles

_THOUSANDS = FuncFormatter(lambda value, _: f"{value:,.0f}")
_UNDER, _OVER = ("#fbf3dc", COLORS["sky"], COLORS["blue"]), (COLORS["orange"], "#8a3c00")
_SHADES = LinearSegmentedColormap.from_list(
    "patches", [*zip((0, 0.25, 0.5), _UNDER, strict=True), *zip((0.5, 1), _OVER, strict=True)]
)


def token_distribution(tokens: Mapping[str, Sequence[int]], limit: int, title: str) -> tuple[Figure, Axes]:
    """One line for each workload: how its images spread over token counts, the median, and the share above the limit.

    Args:
        tokens: workload -> language tokens of each image.
        limit: in tokens, drawn as an upright line.
    """
    order = sorted(tokens, key=lambda name: np.median(tokens[name]))
    fig, ax = new_figure(9.5, 0.62 * len(order) + 1.75)
    edges = limit * 2.0 ** (np.arange(-82, 9) / 8)  # eight bins for each doubling; the limit is an edge
    for row, name in enumerate(order):
        values = np.asarray(tokens[name])
        counts, _ = np.histogram(values, edges)
        ax.stairs(0.86 * counts / counts.max() + row, edges, baseline=row, fill=True, color=COLORS["sky"])
        ax.stairs(0.86 * counts / counts.max() + row, edges, baseline=row, color=COLORS["navy"], lw=1.1)
        median = float(np.median(values))
        ax.plot([median, median], [row, row + 0.86], color=COLORS["orange"], lw=2.6, solid_capstyle="butt")
        words = f"median {median:,.0f}, {np.mean(values > limit):.0%} over"
        ax.annotate(words, (1, row + 0.3), (8, 0), ("axes fraction", "data"), "offset points", va="center", size=10)
    ax.axvline(limit, color=INK, ls=(0, (4, 3)), lw=1.4)
    ax.annotate(f"limit {limit:,}", (limit, 1), (-4, 3), ("data", "axes fraction"), "offset points", ha="right")
    ax.set_xscale("log", base=2)
    ax.set(xlim=(0.9, 2048), ylim=(-0.06, len(order)), xlabel="language tokens of one image")
    ax.set(yticks=np.arange(len(order)) + 0.3, yticklabels=order, ylabel="images per bin, of the line's highest")
    ax.xaxis.set_major_formatter(_THOUSANDS)
    name_lines(ax)
    ax.spines["left"].set_visible(False)
    set_titles(fig, title, COUNTED)
    return fig, ax


def limit_map(
    sides: Sequence[int],
    patches: np.ndarray,
    limit: int,
    bound: int,
    points: Sequence[tuple[int, int, int]],
    title: str,
) -> tuple[Figure, Sequence[Axes]]:
    """Patches of every image size; and of the sizes above the limit, by their shape.

    Args:
        sides: widths and heights in pixels, ascending.
        patches: (heights, widths) patches after padding; 0 where the processor refuses the size.
        limit: `in_token_limit`, in patches.
        bound: the most patches any size can have.
        points: (width, height, patches) above the limit, to mark in both panels.
    """
    fig, (area, shape) = new_figure(10.5, 5.0, ncols=2, width_ratios=(1.28, 1))
    counts = np.ma.masked_equal(patches, 0)
    mesh = area.pcolormesh(
        sides, sides, counts, cmap=_SHADES, norm=TwoSlopeNorm(limit + 0.5, 0, bound), shading="nearest", rasterized=True
    )
    bar = fig.colorbar(mesh, ax=area, pad=0.03, aspect=32, shrink=0.86, ticks=[0, 1024, 2048, 3072, limit, bound])
    bar.ax.yaxis.set_major_formatter(_THOUSANDS)
    bar.ax.minorticks_off()
    area.set_xscale("log", base=2)
    area.set_yscale("log", base=2)
    area.set(
        xlabel="width, pixels", ylabel="height, pixels", aspect="equal", title="patches after padding (white: refused)"
    )
    area.grid(False)
    edge = np.asarray(sides)
    area.plot(edge, limit * PATCH_SIZE**2 / edge, color=INK, ls=(0, (4, 3)), lw=1.4)
    area.text(20, 20, f"dashed: as many pixels\nas {limit:,} patches have", fontsize=10, va="bottom")
    area.set(xlim=(sides[0], sides[-1]), ylim=(sides[0], sides[-1]))

    heights, widths = np.nonzero(patches > limit)
    ratio = np.maximum(edge[heights] / edge[widths], edge[widths] / edge[heights])
    over = patches[heights, widths]
    shape.scatter(ratio, over, s=7, c=over, cmap=mesh.cmap, norm=mesh.norm, linewidths=0, rasterized=True)
    for level, words, lift in ((limit, f"limit {limit:,}", -13), (bound, f"bound {bound:,}", 5)):
        shape.axhline(level, color=INK, ls=(0, (4, 3)), lw=1.4)
        shape.annotate(words, (1, level), (4, lift), textcoords="offset points", fontsize=10)
    for width, height, count in points:
        stretch = max(width / height, height / width)
        _mark(area, (width, height), f"{width} x {height}", left=width > edge[len(edge) // 2])
        _mark(shape, (stretch, count), f"{width} x {height}: {count:,}", left=stretch > 8)
    shape.set_xscale("log", base=2)
    shape.set(xlabel="longer side over shorter side", ylabel="patches after padding", title="sizes above the limit")
    shape.set(xlim=(0.93, 70), ylim=(limit - 0.12 * (bound - limit), bound + 0.14 * (bound - limit)))
    shape.yaxis.set_major_formatter(_THOUSANDS)
    for axis in (area.xaxis, area.yaxis, shape.xaxis):
        axis.set_major_formatter(_THOUSANDS)
    set_titles(fig, title, COUNTED)
    return fig, (area, shape)


def padding_cost(
    blank: Mapping[str, float],
    partly: Mapping[str, float],
    pictures: Sequence[tuple[int, float]],
    worst: Sequence[tuple[int, float]],
    title: str,
) -> tuple[Figure, Sequence[Axes]]:
    """What padding costs a workload, and one image by its size.

    Args:
        blank: workload -> share of its pixels in patches that are nothing but padding.
        partly: workload -> share of its pixels that pad a patch that also shows the image.
        pictures: (language tokens, share of padding) of single images.
        worst: the same of the worst square of each size, drawn as a line.
    """
    order = sorted(blank, key=lambda name: blank[name] + partly[name])
    fig, (left, right) = new_figure(10, 4.5, ncols=2, width_ratios=(1, 1.25))
    y = np.arange(len(order))
    first, second = np.array([blank[name] for name in order]), np.array([partly[name] for name in order])
    style = {"height": 0.62, "edgecolor": COLORS["blue"], "linewidth": 0.8}
    left.barh(y, first, color=COLORS["blue"], label="in blank patches", **style)
    left.barh(y, second, left=first, color=COLORS["sand"], hatch="////", label="in the last patches", **style)
    for at, value in zip(y, first + second, strict=True):
        left.annotate(f"{value:.1%}", (value, at), (5, 0), textcoords="offset points", va="center", size=10)
    left.set(yticks=y, yticklabels=order, xlabel="padding's share of a workload's pixels")
    left.set_xlim(0, 1.22 * (first + second).max())
    left.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    name_lines(left)
    left.legend(loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=2, columnspacing=1.2, handlelength=1.6)

    right.scatter(
        *zip(*pictures, strict=True), s=9, color=COLORS["blue"], alpha=0.35, linewidths=0, label="one image size"
    )
    right.plot(*zip(*worst, strict=True), color=COLORS["orange"], label="a square at its worst")
    right.set_xscale("log", base=2)
    right.set(xlabel="language tokens of one image", ylabel="padding's share of its pixels", ylim=(0, 1))
    right.xaxis.set_major_formatter(_THOUSANDS)
    right.xaxis.set_minor_locator(NullLocator())
    right.yaxis.set_major_formatter(PercentFormatter(1))
    right.legend(loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=2, columnspacing=1.2, handlelength=1.6)
    set_titles(fig, title, COUNTED)
    return fig, (left, right)


def _mark(ax: Axes, at: tuple[float, float], words: str, *, left: bool) -> None:
    ax.plot(*at, "o", color="white", mec=INK, mew=1.8, ms=7.5, zorder=5)
    style = {"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": LIGHT, "alpha": 0.93}
    offset, align = ((-9, 0), "right") if left else ((9, 0), "left")
    ax.annotate(words, at, offset, textcoords="offset points", ha=align, va="center", fontsize=10, bbox=style)
