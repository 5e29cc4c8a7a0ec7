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

from ..measure.timing import Timing
from .patches import Picture
from .style import COLORS, COUNTED, GREY, INK, new_figure, set_titles

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


def memory_growth(
    patches: Sequence[int],
    curves: Mapping[str, Sequence[float]],
    measured: Sequence[tuple[int, float]],
    mark: tuple[int, float, str],
    *,
    title: str,
    subtitle: str,
) -> tuple[Figure, Axes]:
    """Extra memory against the patches of a batch, both axes logarithmic.

    Args:
        patches: of the batch, ascending.
        curves: words -> MiB by formula, up to four; a curve's words stand at its end.
        measured: (patches, MiB), drawn as dots.
        mark: (patches, MiB, words) of the one point to remember.
    """
    fig, ax = new_figure(9.5, 4.5)
    styles = (("orange", "-"), ("blue", (0, (6, 2))), ("sky", "-"), ("navy", (0, (2, 1.5))))
    for (color, line), (words, values) in zip(styles, curves.items(), strict=False):
        ax.plot(patches, values, color=COLORS[color], ls=line)
        ax.annotate(words, (patches[-1], values[-1]), (7, 0), textcoords="offset points", va="center", fontsize=10)
    if measured:
        ax.plot(
            *zip(*measured, strict=True), "o", color=COLORS["orange"], mec=INK, ms=8, label="measured here, float32"
        )
        ax.legend(loc="upper left")
    ax.plot(*mark[:2], "o", mfc="white", mec=INK, mew=1.8, ms=9)
    ax.annotate(mark[2], mark[:2], (12, -12), textcoords="offset points", va="center", fontsize=10)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set(xlim=(patches[0], patches[-1]), xlabel="patches of the batch", ylabel="memory beyond q, k, v, out")
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    lowest, highest = (pick(pick(values) for values in curves.values()) for pick in (min, max))
    ticks = [2.0**power for power in range(-20, 40, 5) if lowest / 2 <= 2.0**power <= highest * 2]
    ax.yaxis.set_major_locator(FixedLocator(ticks))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(lambda value, _: _binary_size(value))
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
    _label_points(left, names, intensity, reached, bound_by_bytes)
    left.set_xscale("log")
    left.set_yscale("log")
    left.set(xlim=(edges[0], edges[-1]), ylim=(lowest, 2.4 * max(peak_gflops, reached.max())))
    left.set(xlabel="FLOP per byte moved", ylabel="GFLOP/s")
    for axis in (left.xaxis, left.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_locator(NullLocator())
    left.annotate(f"matrix product {peak_gflops:,.0f} GFLOP/s", (edges[-1], peak_gflops), (-4, 5),
                  textcoords="offset points", ha="right", fontsize=10)  # fmt: skip
    left.annotate(f"slope: copy {gbps:.1f} GB/s", (ridge / 2.2, ridge / 2.2 * gbps), (-7, 4),
                  textcoords="offset points", ha="right", fontsize=10)  # fmt: skip
    style: dict[str, Any] = {"textcoords": "offset points", "fontsize": 10, "color": GREY}
    left.annotate("bound by bytes", (ridge, lowest), (-5, 5), ha="right", **style)
    left.annotate("bound by arithmetic", (ridge, lowest), (5, 5), **style)
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
    """Names right of the points on the slope; behind the ridge, one label for points of about one intensity."""
    for index in np.flatnonzero(sparse):
        ax.annotate(names[index], (x[index], y[index]), (9, -5), textcoords="offset points", va="center", fontsize=10)
    groups: list[list[int]] = []
    for index in sorted(np.flatnonzero(~sparse).tolist(), key=x.__getitem__):
        if groups and x[index] < 1.2 * x[groups[-1][0]]:
            groups[-1].append(index)
        else:
            groups.append([index])
    for number, group in enumerate(groups):
        place: dict[str, Any] = {"xytext": (16, -21), "ha": "right"}
        if number == 0:
            place = {"xytext": (-9, 0), "ha": "right"}
        if number == len(groups) - 1:
            place = {"xytext": (9, 0), "ha": "left"}
        at = (x[group[0]], min(y[index] for index in group))
        words = ", ".join(names[index] for index in sorted(group))
        ax.annotate(words, at, textcoords="offset points", va="center", fontsize=10, **place)


def _draw_times(ax: Axes, operators: Mapping[str, Operator], roof: np.ndarray) -> None:
    """Predicted (hollow) and measured (filled) milliseconds, one line for each operator, the ratio at its end."""
    y = np.arange(len(operators))[::-1]
    times = [one.time for one in operators.values()]
    measured = np.array([time.p50_ms for time in times])
    predicted = np.array([one.flops for one in operators.values()]) / roof / 1e6
    ax.hlines(y, predicted, measured, color=COLORS["sky"], lw=3)
    ax.plot(predicted, y, "o", mfc="white", mec=COLORS["navy"], mew=1.8, ms=7, label="roofline")
    spread = np.array([[time.p50_ms - time.p20_ms, time.p80_ms - time.p50_ms] for time in times]).T
    ax.errorbar(measured, y, xerr=spread, fmt="o", color=COLORS["navy"], ms=7, ecolor=INK, elinewidth=1.2, capsize=2.5,
                label="measured, p20 to p80")  # fmt: skip
    furthest = np.maximum(predicted, measured + spread[1])
    for at, end, ratio in zip(y, furthest, measured / predicted, strict=True):
        ax.annotate(f"{ratio:.1f}x", (end, at), (8, 0), textcoords="offset points", va="center", fontsize=10)
    ax.set_xscale("log")
    ax.set(yticks=y, yticklabels=list(operators), xlabel="ms", ylim=(-0.6, len(y) + 0.9))
    ax.set_xlim(min(predicted.min(), measured.min()) / 1.5, furthest.max() * 2.2)
    ax.xaxis.set_major_locator(FixedLocator([0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000]))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)
    ax.legend(loc="upper left", ncols=2, columnspacing=1.0, handletextpad=0.3, borderpad=0)
