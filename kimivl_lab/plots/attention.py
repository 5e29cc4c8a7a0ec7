"""Packed attention: the block-diagonal mask and its waste, its memory, rows that a low bound leaves out, a roofline.

Test: tests/test_plots.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter
from numpy.typing import ArrayLike

from ..measure.timing import Timing
from .lines import Marks, draw_lines, log_axis, mark
from .patches import Picture
from .style import COLORS, COUNTED, GREY, INK, LIGHT, new_figure, set_titles

_BANDS = ("navy", "orange", "sky", "blue", "sand")
_MARKS = (("orange", "o"), ("sky", "D"), ("navy", "s"))
_HEAD = 0.08  # room inside a block around its image


@dataclass(frozen=True)
class Operator:
    """One operator of a layer: its work, and how long it took."""

    flops: int
    bytes: int
    time: Timing


def packed_mask(
    pictures: Mapping[str, Picture],
    counts: Sequence[int],
    waste: Mapping[str, Sequence[float]],
    *,
    bound: tuple[str, Sequence[int], Sequence[float]],
    title: str,
) -> tuple[Figure, Sequence[Axes]]:
    """Left, the (L, L) mask of a batch, to scale, with what it hides hatched; right, the hidden share by batch size.

    Args:
        pictures: name -> image with its geometry, in packed order, up to five.
        counts: images in a batch, ascending.
        waste: words -> share (0..1) of the scores that the mask throws away, at each count; up to three.
        bound: (words, counts, shares) of a line that none of them passes.
    """
    fig, (left, right) = new_figure(10.4, 5.3, ncols=2, width_ratios=(1.2, 1))
    lengths = [geometry.patches for _, geometry in pictures.values()]
    offsets = list(accumulate(lengths, initial=0))
    total = offsets[-1]
    left.add_patch(Rectangle((0, 0), total, total, fc="white", ec=GREY, hatch="////", lw=0))
    for color, (name, (image, geometry)), start in zip(_BANDS, pictures.items(), offsets, strict=False):
        side = geometry.patches
        left.add_patch(Rectangle((start, start), side, side, fc=COLORS[color], ec="white", lw=1.5))
        scale = side * (1 - 2 * _HEAD) / max(image.size)
        wide, tall = (scale * pixels for pixels in image.size)
        x, y = start + (side - wide) / 2, start + (side - tall) / 2
        shown, extent = np.asarray(image.convert("RGB")), (x, x + wide, y + tall, y)
        left.imshow(shown, extent=extent, interpolation="antialiased", zorder=3)
        words, room = f"{name}, {side:,}", total - start - side
        at, align = (start + side + total / 80, "left") if room > total / 3 else (start - total / 80, "right")
        box = {"fc": "white", "ec": "none", "pad": 1.5}
        left.text(at, start + side / 2, words, ha=align, va="center", fontsize=10, bbox=box)
    left.set(xlim=(0, total), ylim=(total, 0), aspect="equal", anchor="NW", xticks=offsets, yticks=offsets)
    left.set(xlabel="patch of the key; ticks: cu_seqlens", ylabel="patch of the query")
    left.set_xticklabels(_spaced(offsets, total / 9), size=9.5)
    left.set_yticklabels(_spaced(offsets, total / 24), size=9.5)
    left.grid(False)
    left.spines[["top", "right"]].set_visible(True)

    right.plot(*bound[1:], color=INK, lw=2, label=bound[0])
    for (color, marker), (words, shares) in zip(_MARKS, waste.items(), strict=False):
        right.plot(counts, shares, marker, color=COLORS[color], ms=8.5, mec=INK, mew=0.8, label=words)
    right.set_xscale("log", base=2)
    right.set(xlabel="images in the batch", ylabel="scores that the mask throws away", ylim=(0, 1), xticks=counts)
    right.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
    right.yaxis.set_major_formatter(PercentFormatter(1))
    right.legend(loc="lower right")
    set_titles(fig, title, f"left to scale, hatched: computed and thrown away  ·  {COUNTED}")
    return fig, (left, right)


def mask_steps(
    matrices: Mapping[str, ArrayLike], lengths: Sequence[int], *, title: str
) -> tuple[Figure, Sequence[Axes]]:
    """Small (L, L) matrices side by side, with their numbers; the squares of the images are framed.

    Args:
        matrices: words -> numbers; minus infinity is written so, and its cell is hatched.
        lengths: patches of each image, of the sum L.
    """
    fig, (axes,) = new_figure(10.6, 3.5, ncols=len(matrices), squeeze=False)
    offsets = list(accumulate(lengths, initial=0))
    middles = [start + length / 2 for start, length in zip(offsets, lengths, strict=False)]
    for ax, (words, matrix) in zip(axes, matrices.items(), strict=True):
        total = offsets[-1]
        for (row, column), value in np.ndenumerate(np.asarray(matrix)):
            hidden = value == -np.inf
            color = "white" if hidden or value == 0 else COLORS["sand"]
            ax.add_patch(Rectangle((column, row), 1, 1, fc=color, ec=LIGHT, hatch="////" if hidden else "", lw=0.8))
            number = "-inf" if hidden else f"{value:.0f}" if value in (0, 1) else f"{value:.2f}"
            box = {"fc": "white", "ec": "none", "pad": 0.6} if hidden else None
            ax.text(column + 0.5, row + 0.5, number, ha="center", va="center", fontsize=9, bbox=box)
        for start, length in zip(offsets, lengths, strict=False):
            ax.add_patch(Rectangle((start, start), length, length, fill=False, ec=COLORS["navy"], lw=2.2))
        ax.set(xlim=(-0.03, total + 0.03), ylim=(total + 0.03, -0.03), aspect="equal", xticks=middles, yticks=middles)
        names = [f"image {number + 1}" for number in range(len(lengths))]
        ax.set_xticklabels(names, size=9.5)
        ax.set_yticklabels(names if ax is axes[0] else [], size=9.5, rotation=90, va="center")
        ax.tick_params(length=0)
        ax.set_title(words, fontsize=11)
        ax.set_xlabel("key")
        ax.grid(False)
        ax.spines[:].set_visible(False)
    axes[0].set_ylabel("query")
    set_titles(fig, title, f"framed: query and key of the same image  ·  {COUNTED}")
    return fig, axes


def launch_grid(
    panels: Mapping[str, tuple[Mapping[str, int], int]], tile: int, *, title: str
) -> tuple[Figure, Sequence[Axes]]:
    """The programs of a launch: one line for each image slot, one square for each tile of queries.

    Args:
        panels: words -> (slots, bound): the patches of the image in each slot, by name, and the `max_seqlen` of the
            launch; from top to bottom.
        tile: queries of one program.
    """
    heights = [len(slots) for slots, _ in panels.values()]
    fig, axes = new_figure(10, 0.3 * sum(heights) + 0.62 * len(panels) + 1.5, nrows=len(panels), squeeze=False,
                           gridspec_kw={"height_ratios": heights})  # fmt: skip
    styles: dict[str, dict[str, Any]] = {
        "computes a tile": {"fc": COLORS["blue"], "ec": "white"},
        "has no work, returns at once": {"fc": "white", "ec": GREY},
        "needed, but not launched": {"fc": COLORS["sand"], "ec": COLORS["orange"], "hatch": "xxxx"},
    }
    widest = max(-(-max(bound, *slots.values()) // tile) for slots, bound in panels.values())
    for ax, (words, (slots, bound)) in zip(axes[:, 0], panels.items(), strict=True):
        launched = -(-bound // tile)
        for row, patches in enumerate(slots.values()):
            needed = -(-patches // tile)
            for column in range(max(launched, needed)):
                kind = ("has no work, returns at once", "computes a tile")[column < needed]
                style = styles[kind if column < launched else "needed, but not launched"]
                ax.add_patch(Rectangle((column + 0.08, row - 0.38), 0.84, 0.76, lw=1.1, **style))
        ax.set(xlim=(0, widest + 0.1), ylim=(len(slots) - 0.5, -0.5), yticks=range(len(slots)))
        ax.set_yticklabels([f"{name}, {patches:,}" if patches else name for name, patches in slots.items()], size=10)
        ax.set_xticks([column + 0.5 for column in range(0, widest, 2)])
        ax.set_xticklabels([str(column) for column in range(0, widest, 2)], size=9.5)
        ax.axvline(launched + 0.01, color=INK, lw=1.6, ls=(0, (4, 2)))
        ax.set_title(words, fontsize=11)
        ax.tick_params(length=0)
        ax.grid(False)
        ax.spines[:].set_visible(False)
    axes[-1, 0].set_xlabel(f"tile number: {tile} queries of the image each")
    handles = [Rectangle((0, 0), 1, 1, label=label, **style) for label, style in styles.items()]
    handles = handles if any(max(slots.values()) > bound for slots, bound in panels.values()) else handles[:2]
    fig.legend(handles=handles, loc="outside lower center", ncols=3)
    set_titles(fig, title, f"one square: one program  ·  dashed: where the launch ends  ·  {COUNTED}")
    return fig, axes[:, 0]


def memory_growth(
    patches: Sequence[int],
    curves: Mapping[str, Sequence[float]],
    measured: Mapping[str, Sequence[tuple[int, float]]],
    mark: tuple[int, float, str],
    *,
    title: str,
    subtitle: str,
) -> tuple[Figure, Axes]:
    """Extra memory against the patches of a batch, both axes logarithmic.

    Args:
        patches: of the batch, ascending.
        curves: words -> MiB by formula, up to four; a curve's words stand at its end.
        measured: words -> (patches, MiB) of each measurement, drawn as marks; up to three.
        mark: (patches, MiB, words) of the one point to remember.
    """
    fig, ax = new_figure(9.5, 4.6)
    styles = (("orange", "-"), ("blue", (0, (6, 2))), ("sky", "-"), ("navy", (0, (2, 1.5))))
    for (color, line), (words, values) in zip(styles, curves.items(), strict=False):
        ax.plot(patches, values, color=COLORS[color], ls=line)
        ax.annotate(words, (patches[-1], values[-1]), (7, 0), textcoords="offset points", va="center", fontsize=10)
    for (color, marker), (words, points) in zip(_MARKS, measured.items(), strict=False):
        style: dict[str, Any] = {"color": COLORS[color], "mec": INK, "ms": 8, "ls": "none", "label": words}
        ax.plot([at for at, _ in points], [mib for _, mib in points], marker, **style)
    ax.plot(*mark[:2], "o", mfc="white", mec=INK, mew=1.8, ms=9)
    ax.annotate(mark[2], mark[:2], (12, -12), textcoords="offset points", va="center", fontsize=10)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set(xlim=(patches[0], patches[-1]), xlabel="patches of the batch", ylabel="memory beyond q, k, v")
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    lowest, highest = (pick(pick(values) for values in curves.values()) for pick in (min, max))
    ax.yaxis.set_major_locator(FixedLocator([16.0**power for power in range(-5, 6)]))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set_ylim(lowest / 3, highest * 3)
    ax.yaxis.set_major_formatter(lambda value, _: _binary_size(value))
    if any(points for points in measured.values()):
        ax.legend(loc="upper left")
    set_titles(fig, title, subtitle)
    return fig, ax


def missing_rows(
    lines: Sequence[Mapping[str, Mapping[str, tuple[Picture, int]]]], *, title: str, subtitle: str = COUNTED
) -> tuple[Figure, Axes]:
    """Batches of images; the patches that were never computed are hatched.

    Args:
        lines: from top to bottom; each holds batches side by side: words -> name -> (image, patches computed, counted
            from the first).
    """
    gap, between, step = 0.1, 0.55, 1.5
    shapes = [
        [[one.grid_w / one.grid_h for (_, one), _ in batch.values()] for batch in line.values()] for line in lines
    ]
    lengths = [sum(sum(batch) + gap * len(batch) + between for batch in line) - gap - between for line in shapes]
    width = max(lengths)
    fig, ax = new_figure(10, 10 / width * step * len(lines) + 0.72)
    for row, line in enumerate(lines):
        x, y = 0.0, row * step
        for words, batch in line.items():
            start = x
            for name, (picture, computed) in batch.items():
                _draw_computed(ax, x, y, name, picture, computed)
                x += picture[1].grid_w / picture[1].grid_h + gap
            ax.plot((start, x - gap), (y - 0.25, y - 0.25), color=INK, lw=1.2)
            ax.text(start, y - 0.28, words, va="bottom", fontweight="bold")
            x += between
    ax.set(xlim=(-0.005, width + 0.01), ylim=((len(lines) - 1) * step + 1.01, -0.42), aspect="equal", anchor="NW")
    ax.set_axis_off()
    set_titles(fig, title, subtitle)
    return fig, ax


def roofline(
    operators: Mapping[str, Operator], peak_gflops: float, gbps: float, *, title: str, subtitle: str
) -> tuple[Figure, Sequence[Axes]]:
    """Left, the operators under the roof of this machine; right, the roof's time beside the measured one.

    Args:
        operators: name -> its work and time, in the order of the forward.
        peak_gflops, gbps: measured on the same machine; they meet at the ridge.
    """
    fig, (left, right) = new_figure(10.6, 5.2, ncols=2, width_ratios=(1.5, 1))
    names = list(operators)
    intensity = np.array([one.flops / one.bytes for one in operators.values()])
    reached = np.array([one.flops / one.time.p50_ms / 1e6 for one in operators.values()])
    ridge, roof = peak_gflops / gbps, np.minimum(peak_gflops, intensity * gbps)
    edges = np.array([min(intensity.min() / 3, ridge / 4), ridge, intensity.max() * 12])
    lowest = min(reached.min(), roof.min()) / 3
    left.plot(edges, np.minimum(peak_gflops, edges * gbps), color=INK, lw=2)
    left.fill_between(edges, lowest, np.minimum(peak_gflops, edges * gbps), color=COLORS["sand"], alpha=0.45, lw=0)
    left.axvline(ridge, color=GREY, lw=1.1, ls=(0, (4, 3)))
    left.vlines(intensity, reached, roof, color=COLORS["sky"], lw=2)
    bound_by_bytes = intensity < ridge
    for chosen, color, marker in ((bound_by_bytes, "orange", "s"), (~bound_by_bytes, "navy", "o")):
        left.plot(intensity[chosen], reached[chosen], marker, color=COLORS[color], ms=7.5, mec="white", mew=0.8)
    left.set_xscale("log")
    left.set_yscale("log")
    left.set(xlim=(edges[0], edges[-1]), ylim=(lowest, 2.4 * max(peak_gflops, reached.max())))
    left.set(xlabel="FLOPs for each byte moved", ylabel="GFLOP/s")
    for axis in (left.xaxis, left.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_locator(NullLocator())
    _label_points(left, names, intensity, reached, bound_by_bytes)
    left.annotate(f"matrix product {peak_gflops:,.0f} GFLOP/s", (edges[-1], peak_gflops), (-4, 5),
                  textcoords="offset points", ha="right", fontsize=10)  # fmt: skip
    left.annotate(f"slope: copy {gbps:.1f} GB/s", (ridge / 2.2, ridge / 2.2 * gbps), (-7, 4),
                  textcoords="offset points", ha="right", fontsize=10)  # fmt: skip
    style: dict[str, Any] = {"textcoords": "offset points", "fontsize": 10, "color": GREY}
    left.annotate("waits for memory", (ridge, lowest), (-5, 5), ha="right", **style)
    left.annotate("waits for arithmetic", (ridge, lowest), (5, 5), **style)
    left.annotate(f"ridge {ridge:.0f}", (ridge, left.get_ylim()[1]), (5, -3), va="top", **style)
    _draw_times(right, operators, roof)
    set_titles(fig, title, subtitle)
    return fig, (left, right)


def _spaced(values: Sequence[int], least: float) -> list[str]:
    """Tick labels; one that would stand closer than `least` to the label before it, or to the last, stays empty."""
    words, last = [], -least
    for value in values:
        keep = value == values[-1] or (value - last >= least and values[-1] - value >= least)
        words.append(f"{value:,}" if keep else "")
        last = value if keep else last
    return words


def _binary_size(mib: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        size = mib * 2**20 / 1024 ** ("B", "KiB", "MiB", "GiB").index(unit)
        if size < 1024:
            return f"{size:g} {unit}"
    return f"{mib / 2**20:g} TiB"


def _draw_computed(ax: Axes, x: float, y: float, name: str, picture: Picture, computed: int) -> None:
    """An image of height 1 at (x, y) as encoded, hatched from patch number `computed` on, row-major."""
    image, geometry = picture
    h, w = geometry.grid_hw
    canvas = np.zeros((geometry.padded_height, geometry.padded_width, 3), dtype=np.uint8)
    shown = image.convert("RGB").resize((geometry.resized_width, geometry.resized_height))
    canvas[: shown.height, : shown.width] = np.asarray(shown)
    ax.imshow(canvas, extent=(x, x + w / h, y + 1, y), interpolation="antialiased")
    rows, columns = divmod(computed, w)
    style: dict[str, Any] = {"fc": "white", "ec": COLORS["blue"], "hatch": "////", "alpha": 0.93, "lw": 0}
    if columns:
        ax.add_patch(Rectangle((x + columns / h, y + rows / h), (w - columns) / h, 1 / h, **style))
    first = rows + (columns > 0)
    if first < h:
        ax.add_patch(Rectangle((x, y + first / h), w / h, 1 - first / h, **style))
    ax.add_patch(Rectangle((x, y), w / h, 1, fill=False, ec=GREY, lw=0.9))
    missing = geometry.patches - computed
    verdict = f"{missing:,} of {geometry.patches:,} missing" if missing else f"all {geometry.patches:,} there"
    ax.text(x, y - 0.03, f"{name}\n{verdict}", va="bottom", fontsize=9.5, linespacing=1.3)


def _label_points(ax: Axes, names: Sequence[str], x: np.ndarray, y: np.ndarray, sparse: np.ndarray) -> None:
    """Names with leader lines: right of the points on the slope, below those behind the ridge.

    On the slope, labels that would touch move apart. Behind the ridge, points of about one intensity share a label.
    """
    arrow: dict[str, Any] = {"arrowstyle": "-", "color": GREY, "lw": 0.8, "shrinkA": 1, "shrinkB": 3}
    style: dict[str, Any] = {"textcoords": "offset points", "fontsize": 10, "va": "center", "arrowprops": arrow,
                             "bbox": {"fc": "white", "ec": "none", "alpha": 0.75, "pad": 0.8}}  # fmt: skip
    floor = np.inf
    for index in sorted(np.flatnonzero(sparse).tolist(), key=y.__getitem__, reverse=True):
        height = float(ax.transData.transform((x[index], y[index]))[1]) * 72 / ax.figure.dpi
        wanted = min(height - 6, floor - 15)
        ax.annotate(names[index], (x[index], y[index]), (16, wanted - height), **style)
        floor = wanted
    groups: list[list[int]] = []
    for index in sorted(np.flatnonzero(~sparse).tolist(), key=x.__getitem__):
        if groups and x[index] < 1.2 * x[groups[-1][0]]:
            groups[-1].append(index)
        else:
            groups.append([index])
    for number, group in enumerate(groups):
        words = ",\n".join(names[index] for index in sorted(group))
        lowest = min(group, key=y.__getitem__)
        place: dict[str, Any] = {"xytext": (0, -30 - 7 * (len(group) - 1)), "ha": "center"}
        if len(groups) > 1 and number == 0:
            place = {"xytext": (-14, -10), "ha": "right"}
        if len(groups) > 1 and number == len(groups) - 1:
            place = {"xytext": (14, -10), "ha": "left"}
        ax.annotate(words, (x[lowest], y[lowest]), **place, **style)


def _draw_times(ax: Axes, operators: Mapping[str, Operator], roof: np.ndarray) -> None:
    """Predicted (hollow) and measured (filled) milliseconds, one line for each operator, the ratio at its end."""
    p20, p50, p80 = np.array([(one.time.p20_ms, one.time.p50_ms, one.time.p80_ms) for one in operators.values()]).T
    predicted, style = np.array([one.flops for one in operators.values()]) / roof / 1e6, mark("navy", "o", 7)
    marks = [
        Marks("roofline", predicted, style | {"mfc": "white"}),
        Marks("measured, p20 to p80", p50, style, p20, p80),
    ]
    draw_lines(ax, list(operators), marks, notes=[f"{ratio:.1f}x" for ratio in p50 / predicted])
    log_axis(ax, "ms")
