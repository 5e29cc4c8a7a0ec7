"""The cost model beside measurements, and its predictions: where data or tensor parallel wins, how each scales.

Test: tests/test_plots.py.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MultipleLocator, NullLocator, PercentFormatter

from ..measure.timing import Timing
from .style import COLORS, GREY, INK, new_figure, set_titles

_MARKS = {
    "single": ("one rank", COLORS["sky"], "D", "-"),
    "data": ("data parallel", COLORS["navy"], "o", "-"),
    "tensor": ("tensor parallel", COLORS["orange"], "s", (0, (5, 2))),
}
_SIDES = LinearSegmentedColormap.from_list("sides", ["#a34a00", COLORS["orange"], "#fffaf0", COLORS["sky"], "#0b3b66"])
_PLAIN = FuncFormatter(lambda value, _: f"{value:,g}")


def predicted_against_measured(
    pairs: Mapping[str, Sequence[tuple[Timing, float]]],
    fitted: Mapping[str, Sequence[tuple[Timing, float]]],
    band: float,
    *,
    title: str,
    subtitle: str,
) -> tuple[Figure, Sequence[Axes]]:
    """Left, predicted against measured median time of every batch; right, how far off, a line for p20 to p80.

    Args:
        pairs: mode -> (measured, predicted ms) of batches that the model has not seen.
        fitted: the same of those it was fitted on, drawn hollow.
        band: relative error that is shaded: 0.15 is 15 % either way.
    """
    fig, (left, right) = new_figure(10.4, 4.9, ncols=2, width_ratios=(1, 1.25))
    times = np.array([(t.p50_ms, ms) for group in (pairs, fitted) for batches in group.values() for t, ms in batches])
    ends = np.array([0.6 * times.min(), 1.7 * times.max()])
    left.fill_between(ends, ends * (1 - band), ends * (1 + band), color=COLORS["sand"], alpha=0.7, lw=0)
    left.plot(ends, ends, color=INK, lw=1.4)
    right.axhspan(-band, band, color=COLORS["sand"], alpha=0.7, lw=0)
    right.axhline(0, color=INK, lw=1.4)
    for group, hollow in ((fitted, True), (pairs, False)):
        for mode, batches in group.items():
            words, color, marker, _ = _MARKS[mode]
            measured, predicted = np.array([(t.p50_ms, ms) for t, ms in batches]).T
            style = {"mfc": "none", "mec": GREY, "ms": 6.5} if hollow else {"color": color, "mec": INK, "ms": 8}
            label = None if hollow else words
            left.plot(measured, predicted, marker, mew=1.1, label=label, **style)
            spread = [[ms / t.p80_ms - 1 for t, ms in batches], [ms / t.p20_ms - 1 for t, ms in batches]]
            right.vlines(measured, *spread, color=GREY if hollow else color, lw=1.2)
            right.plot(measured, predicted / measured - 1, marker, mew=1.1, **style)
    left.plot([], [], "o", mfc="none", mec=GREY, mew=1.1, ms=6.5, label="fitted on")
    for ax in (left, right):
        ax.set_xscale("log")
        ax.set(xlim=ends, xlabel="measured, ms")
        ax.xaxis.set_major_formatter(_PLAIN)
        ax.xaxis.set_minor_locator(NullLocator())
    left.set_yscale("log")
    left.set(ylim=ends, aspect="equal", ylabel="predicted, ms")
    left.yaxis.set_major_formatter(_PLAIN)
    left.yaxis.set_minor_locator(NullLocator())
    left.legend(loc="upper left", handletextpad=0.3)
    most = max(1.6 * band, 1.1 * float(np.abs(times[:, 1] / times[:, 0] - 1).max()))
    right.set(ylim=(-most, most), ylabel="predicted over measured, less 1")
    right.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    right.annotate(f"{band:.0%}", (ends[1], band), (-4, 4), textcoords="offset points", ha="right", size=10)
    set_titles(fig, title, subtitle)
    return fig, (left, right)


def crossover_map(
    panels: Mapping[str, np.ndarray],
    sizes: Sequence[int],
    counts: Sequence[int],
    *,
    title: str,
    subtitle: str,
) -> tuple[Figure, Sequence[Axes]]:
    """Time of tensor over data parallel, by image size and number of images, as colour and as number in each cell.

    Args:
        panels: words ("2 ranks", "8 ranks, simulated") -> (counts, sizes) time of tensor over data parallel.
        sizes: patches of one image, ascending.
        counts: images in the batch, ascending.
    """
    fig, axes = new_figure(
        (0.5 * len(sizes) + 0.4) * len(panels) + 1.4, 4.5, ncols=len(panels), sharey=True, squeeze=False
    )
    axes = list(axes[0])
    most = max(float(np.abs(np.log2(ratios)).max()) for ratios in panels.values())
    columns, rows = np.arange(len(sizes)), np.arange(len(counts))
    for ax, (words, ratios) in zip(axes, panels.items(), strict=True):
        logs = np.log2(ratios)
        mesh = ax.imshow(logs, cmap=_SIDES, vmin=-most, vmax=most, origin="lower", aspect="auto")
        for row in rows:
            for column in columns:
                ratio = ratios[row, column]
                ink = "white" if abs(logs[row, column]) > 0.62 * most else INK
                number = f"{ratio:.2f}" if 0.1 <= ratio < 10 else f"{ratio:.3g}"
                ax.text(column, row, number, ha="center", va="center", size=9, color=ink)
        _outline(ax, ratios < 1)
        ax.set(title=words, xticks=columns, yticks=rows, xlabel="patches of one image")
        ax.set_xticklabels([f"{size:,}" for size in sizes], fontsize=9)
        ax.set_yticklabels([f"{count:,}" for count in counts])
        ax.grid(False)
    axes[0].set_ylabel("images in the batch")
    bar = fig.colorbar(mesh, ax=axes, pad=0.015, aspect=30)
    bar.set_label("time of tensor / time of data parallel")
    bar.ax.yaxis.set_major_locator(MultipleLocator(1))
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{2**value:g}" if value >= 0 else f"1/{2**-value:g}")
    line = [axes[0].plot([], [], color=INK, lw=2.4)[0]]
    fig.legend(
        line,
        ["inside, below 1: tensor parallel is faster; outside, above 1: data parallel is faster"],
        loc="outside lower left",
    )
    set_titles(fig, title, subtitle)
    return fig, axes


def _outline(ax: Axes, inside: np.ndarray) -> None:
    """A line around the cells of `inside`, where they meet others."""
    for row, column in zip(*np.nonzero(inside), strict=True):
        for down, right, ends in (
            (1, 0, ((-0.5, 0.5), (0.5, 0.5))),
            (-1, 0, ((-0.5, 0.5), (-0.5, -0.5))),
            (0, 1, ((0.5, 0.5), (-0.5, 0.5))),
            (0, -1, ((-0.5, -0.5), (-0.5, 0.5))),
        ):
            y, x = row + down, column + right
            if 0 <= y < inside.shape[0] and 0 <= x < inside.shape[1] and not inside[y, x]:
                ax.plot([column + e for e in ends[0]], [row + e for e in ends[1]], color=INK, lw=2.4)
