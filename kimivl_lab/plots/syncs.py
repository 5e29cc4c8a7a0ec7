"""Host syncs: host and device on one clock, counts by depth, a pinned buffer rewritten too early, prices of waits.

Test: tests/test_plots.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, NullLocator, PercentFormatter

from .style import COLORS, COUNTED, GREY, INK, name_lines, new_figure, set_titles

Span = tuple[float, float]

_SPANS: dict[str, dict[str, Any]] = {
    "launch": {"fc": COLORS["navy"]},
    "host waits": {"fc": COLORS["sand"], "hatch": "////", "ec": COLORS["orange"]},
    "kernel": {"fc": COLORS["blue"]},
    "device idle": {"fc": "white", "hatch": "....", "ec": GREY},
}
_TRACED = 24  # launches that still can be followed to their kernels
_LINES = (("orange", "-", "s"), ("navy", (0, (6, 2)), "o"), ("blue", (0, (2, 1.2)), "D"))


@dataclass(frozen=True)
class Timeline:
    """Spans (start, end) on one clock, in order: what the host launched and waited for, what the device ran."""

    launches: Sequence[Span]
    waits: Sequence[Span]
    kernels: Sequence[Span]

    @property
    def end(self) -> float:
        """When host and device are both done."""
        return max(spans[-1][1] for spans in (self.launches, self.waits, self.kernels) if spans)

    @property
    def idle(self) -> list[Span]:
        """When the device had nothing to do."""
        ends = [0.0, *(end for _, end in self.kernels)]
        starts = [*(start for start, _ in self.kernels), self.end]
        return [(end, start) for end, start in zip(ends, starts, strict=True) if start > end]


def timelines(panels: Mapping[str, Timeline], *, axis: str, title: str, subtitle: str) -> tuple[Figure, Sequence[Axes]]:
    """Host above device, one panel for each program on one scale: launches, waits, kernels, the device's idle time.

    Args:
        panels: words -> its spans.
        axis: what the times are, with their unit.
    """
    fig, axes = new_figure(10, 1.14 * len(panels) + 1.75, nrows=len(panels), sharex=True, squeeze=False)
    axes = list(axes[:, 0])
    for ax, (words, shown) in zip(axes, panels.items(), strict=True):
        traced = len(shown.launches) <= _TRACED
        edge = {"ec": "white", "lw": 0.8} if traced else {"lw": 0}
        every = (shown.launches, shown.waits, shown.kernels, shown.idle)
        for (name, style), spans, low in zip(_SPANS.items(), every, (0.62, 0.62, 0, 0), strict=True):
            ax.broken_barh([(a, b - a) for a, b in spans], (low, 0.5), label=name, **(edge | style))
        if traced:
            ends = zip(shown.launches, shown.kernels, strict=True)
            steps = [((launch[1], 0.62), (kernel[0], 0.5)) for launch, kernel in ends]
            ax.add_collection(LineCollection(steps, colors=GREY, lw=0.9))
        ax.set(ylim=(-0.08, 1.2), yticks=(0.25, 0.87), yticklabels=("device", "host"), title=words)
        name_lines(ax)
        ax.spines["left"].set_visible(False)
    axes[0].set_xlim(0, 1.01 * max(shown.end for shown in panels.values()))
    axes[-1].set_xlabel(axis)
    axes[-1].xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    handles = [Patch(label=name, lw=0, **style) for name, style in _SPANS.items()]
    fig.legend(handles=handles, loc="outside lower right", ncols=4, handlelength=1.6, columnspacing=1.4)
    set_titles(fig, title, subtitle)
    return fig, axes


def waits_by_depth(
    depths: Sequence[int], counts: Mapping[str, Mapping[int, Sequence[int]]], *, title: str
) -> tuple[Figure, Axes]:
    """Waits of one forward against the blocks of the tower; the size of a ring is the number of images.

    Args:
        depths: layers, ascending.
        counts: words for a variant -> images in the batch -> waits at each depth; up to three variants, each with the
            same numbers of images.
    """
    fig, ax = new_figure(9.5, 4.3)
    for (color, line, marker), (words, by_images) in zip(_LINES, counts.items(), strict=False):
        for ring, values in enumerate(by_images.values()):
            ring_style = {"ms": 6 + 6 * ring, "mfc": COLORS[color] if ring == 0 else "none", "mew": 1.5}
            ax.plot(depths, values, marker, color=COLORS[color], clip_on=False, zorder=3, **ring_style)
        first = next(iter(by_images.values()))
        ax.plot(depths, first, color=COLORS[color], ls=line, zorder=2)
        ax.annotate(words, (depths[-1], first[-1]), (17, 0), textcoords="offset points", va="center")
    for ring, images in enumerate(next(iter(counts.values()))):
        fill = GREY if ring == 0 else "none"
        ax.plot([], [], "o", color=GREY, mfc=fill, ms=6 + 6 * ring, mew=1.5, label=f"{images}")
    most = max(max(values) for by_images in counts.values() for values in by_images.values())
    ax.set(xlim=(0, depths[-1]), ylim=(-0.07 * most, 1.08 * most), xticks=depths)
    ax.set(xlabel="blocks of the tower", ylabel="waits of one forward")
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend(title="images in the batch", loc="upper left", ncols=3, handletextpad=0.6)
    set_titles(fig, title, COUNTED)
    return fig, ax


@dataclass(frozen=True)
class BufferStep:
    """The host writes `batch` into a buffer, or the device copies what it holds by then.

    Attributes:
        actor: "host" or "device".
        batch: which batch is written, or wanted.
        buffer: number of the buffer, from 0.
        held: the batch that lies in the buffer.
    """

    actor: str
    batch: str
    buffer: int
    held: str


def pinned_buffers(panels: Mapping[str, Sequence[BufferStep]], *, title: str) -> tuple[Figure, Sequence[Axes]]:
    """What the host writes, what each buffer holds, and what the device's copies find, in the order of events.

    Args:
        panels: words -> steps in order, of up to four batches.
    """
    batches = sorted({step.batch for steps in panels.values() for step in steps})
    color = dict(zip(batches, ("navy", "orange", "sky", "sand"), strict=False))
    rows = [3 + max(step.buffer for step in steps) for steps in panels.values()]
    height = 0.36 * sum(rows) + 0.5 * len(panels) + 1.3
    fig, axes = new_figure(10, height, nrows=len(panels), sharex=True, squeeze=False, height_ratios=rows)
    axes = list(axes[:, 0])
    for ax, count, (words, steps) in zip(axes, rows, panels.items(), strict=True):
        top = count - 1
        for number in range(1, top):
            written = [
                (at, one.held) for at, one in enumerate(steps) if (one.actor, one.buffer + 1) == ("host", number)
            ]
            for (start, held), (end, _) in pairwise([*written, (len(steps) - 1, "")]):
                ax.barh(number, end - start, left=start + 0.5, height=0.46, color=COLORS[color[held]], alpha=0.5, lw=0)
        for at, one in enumerate(steps):
            _draw_step(ax, at + 0.5, one, top, color[one.held])
        names = ["device", *(f"buffer {number}" for number in range(1, top)), "host"]
        ax.set(yticks=range(count), yticklabels=names, ylim=(-0.55, top + 0.55), title=words)
        ax.tick_params(axis="y", length=0)
        ax.grid(visible=False)
        ax.spines["left"].set_visible(False)
    axes[-1].set(xlim=(0, max(map(len, panels.values()))), xticks=[], xlabel="order of events")
    set_titles(fig, title, f"a colour is a batch; crossed: the device gets another than it should  ·  {COUNTED}")
    return fig, axes


def price_of_waits(
    kernel_us: Sequence[float] | np.ndarray,
    prices: Mapping[str, Sequence[float]],
    slower: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    marks: Mapping[str, tuple[float, float]],
    *,
    title: str,
    subtitle: str,
) -> tuple[Figure, Sequence[Axes]]:
    """Left, what one wait adds; right, by how much a forward gets slower; both against the time of its kernels.

    Args:
        kernel_us: time of one kernel, ascending.
        prices: words for a launch time -> µs that one wait adds; up to three.
        slower: words -> (least, most) added share of the forward's time; up to three.
        marks: words -> (kernel time, added share) of a point known from elsewhere.
    """
    fig, (left, right) = new_figure(10.4, 4.6, ncols=2)
    for (color, line, _), (words, values) in zip(_LINES, prices.items(), strict=False):
        left.plot(kernel_us, values, color=COLORS[color], ls=line, label=words)
    left.set(ylim=(0, 1.1 * max(map(max, prices.values()))), ylabel="one wait adds, µs")
    left.legend(title="host's time for a launch", loc="lower right")
    for (color, line, _), (words, (low, high)) in zip(_LINES, slower.items(), strict=False):
        right.fill_between(kernel_us, low, high, color=COLORS[color], alpha=0.35, lw=0)
        right.plot(kernel_us, low, color=COLORS[color], ls=line, lw=1.3)
        right.plot(kernel_us, high, color=COLORS[color], ls=line, lw=1.3, label=words)
    for words, point in marks.items():
        right.plot(*point, "o", mfc="white", mec=INK, mew=1.8, ms=9)
        line = {"arrowstyle": "-", "color": INK, "shrinkB": 5}
        right.annotate(words, point, (0, 66), textcoords="offset points", ha="center", fontsize=10, arrowprops=line)
    right.set(ylim=(0, None), ylabel="waits add to the forward")
    right.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    right.legend(loc="upper right")
    for ax in (left, right):
        ax.set_xscale("log")
        ax.set(xlim=(kernel_us[0], kernel_us[-1]), xlabel="time of one kernel, µs")
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.xaxis.set_minor_locator(NullLocator())
    set_titles(fig, title, subtitle)
    return fig, (left, right)


def published_savings(
    rows: Mapping[str, tuple[float, float, float]], *, title: str, subtitle: str
) -> tuple[Figure, Axes]:
    """Time that removed waits saved, as published, over the time that their number predicts.

    Args:
        rows: words -> (least predicted, most predicted, published), in ms.
    """
    fig, ax = new_figure(10, 0.5 * len(rows) + 1.95)
    y = np.arange(len(rows))[::-1]
    low, high, published = (np.array(column) for column in zip(*rows.values(), strict=True))
    style = {"height": 0.36, "fc": COLORS["sand"], "ec": COLORS["blue"], "hatch": "////", "lw": 0.8}
    ax.barh(y, high - low, left=low, label="predicted: waits removed x one read alone", **style)
    ax.plot(published, y, "o", color=COLORS["navy"], ms=9, mec="white", label="published")
    for at, value in zip(y, published, strict=True):
        ax.annotate(f"{value:.3g}", (value, at), (0, 9), textcoords="offset points", ha="center", size=10)
    ax.set_xscale("log")
    ax.set(yticks=y, yticklabels=list(rows), ylim=(-0.6, len(rows) - 0.4), xlabel="time saved, ms")
    ax.set_xlim(low.min() / 2, 3 * max(high.max(), published.max()))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.xaxis.set_minor_locator(NullLocator())
    name_lines(ax)
    ax.legend(loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=2)
    set_titles(fig, title, subtitle)
    return fig, ax


def _draw_step(ax: Axes, x: float, step: BufferStep, top: int, color: str) -> None:
    """A box in the actor's row, and an arrow along which the data go."""
    right, by_host = step.held == step.batch, step.actor == "host"
    row, buffer = (top if by_host else 0), step.buffer + 1
    hatch = "" if right else "xxx"
    ax.barh(row, 0.94, left=x - 0.47, height=0.8, color=COLORS[color], hatch=hatch, ec="white", lw=0)
    said = f"writes {step.batch}" if by_host else f"copies {step.batch}"
    words = said if right else f"wants {step.batch}, gets {step.held}"
    ink = "white" if color == "navy" else INK
    box = {"fc": COLORS[color], "ec": "none", "pad": 1.2}
    ax.text(x, row, words, ha="center", va="center", size=9.5, color=ink, bbox=box)
    ends = ((x, row - 0.4), (x, buffer + 0.23)) if by_host else ((x, buffer - 0.23), (x, 0.4))
    ax.annotate(
        "", ends[1], ends[0], arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 1.1, "shrinkA": 0, "shrinkB": 0}
    )
