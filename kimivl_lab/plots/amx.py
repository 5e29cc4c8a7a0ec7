"""AMX kernels: the useful share of tile work, a running maximum with slack, loops and levels, recorded times.

Test: tests/test_plots.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MultipleLocator, PercentFormatter

from .lines import Cases, Marks, Row, by_case, case_words, draw_lines, log_axis, mark, recorded_times
from .style import COLORS, COUNTED, GREY, INK, new_figure, set_titles

_MARKS = (mark("orange", "s", 8), mark("sky", "D", 7.5), mark("navy", "o", 8.5))
_CURVES = (("orange", (0, (5, 1.6)), 1.6), ("sky", "-", 1.6), ("navy", "-", 2.8))
_QUERIES = (("sky", "^"), ("orange", "s"), ("navy", "o"))


@dataclass(frozen=True)
class Maxima:
    """The maxima of a few queries, one run of keys after another; each sequence is (runs, queries).

    here: the largest score of the run itself.
    top: the running maximum that the run's weights were taken from.
    raised: whether it was raised in this run, the first not counted.
    """

    here: Sequence[Sequence[float]]
    top: Sequence[Sequence[float]]
    raised: Sequence[Sequence[bool]]


def useful_share(
    sizes: Sequence[int], shares: Mapping[str, Sequence[float]], mark: int, *, title: str
) -> tuple[Figure, Axes]:
    """The share of the tile work that is not padding, by head size.

    Args:
        sizes: head sizes, ascending, `mark` among them.
        shares: words -> share (0..1) at each size, up to three; the last one is the sum of the others.
        mark: the head size whose shares stand beside their marks.
    """
    fig, ax = new_figure(9.6, 4.6)
    at = list(sizes).index(mark)
    for (color, line, width), (words, values) in zip(_CURVES, shares.items(), strict=False):
        ax.plot(sizes, values, color=COLORS[color], ls=line, lw=width, label=words)
        ax.plot(mark, values[at], "o", color=COLORS[color], mec=INK, ms=8.5, zorder=4)
        ax.annotate(f"{values[at]:.0%}", (mark, values[at]), (9, -4), textcoords="offset points", fontsize=10.5,
                    bbox={"fc": "white", "ec": "none", "pad": 0.8}, zorder=5)  # fmt: skip
    ax.axvline(mark, color=GREY, lw=1.1, ls=(0, (4, 3)), zorder=0)
    ax.annotate(f"head size {mark}", (mark, 1), (0, 3), ("data", "axes fraction"), "offset points", ha="center",
                fontsize=10, color=GREY)  # fmt: skip
    lowest = min(min(values) for values in shares.values())
    ax.set(xlim=(sizes[0], sizes[-1]), ylim=(lowest - 0.03, 1.01))
    ax.set(xlabel="head size, features", ylabel="useful share of the tile work")
    ax.xaxis.set_major_locator(MultipleLocator(8))
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    ax.legend(loc="lower right")
    set_titles(fig, title, COUNTED)
    return fig, ax


def running_maxima(
    panels: Mapping[str, Maxima], queries: Sequence[str], run: int, *, title: str, slack: Sequence[float]
) -> tuple[Figure, Sequence[Axes]]:
    """Each panel is the running maximum of a few queries over the keys, with a mark where it was raised.

    Args:
        panels: words -> maxima.
        queries: words of each query, up to three.
        run: keys in a run.
        slack: of each panel, in powers of two; the room above the maximum is shaded.
    """
    fig, axes = new_figure(10.6, 4.9, ncols=len(panels), sharey=True, sharex=True)
    for ax, (words, maxima), room in zip(axes, panels.items(), slack, strict=True):
        here, top, raised = (np.asarray(values) for values in (maxima.here, maxima.top, maxima.raised))
        keys = run * np.arange(len(top) + 1)
        for (color, marker), name, column in zip(_QUERIES, queries, range(top.shape[1]), strict=False):
            steps = np.append(top[:, column], top[-1, column])
            ax.fill_between(keys, steps, steps + room, step="post", color=COLORS["sand"], alpha=0.55, lw=0)
            ax.step(keys, steps, where="post", color=COLORS[color], lw=2)
            ax.plot(keys[:-1] + run / 2, here[:, column], ".", color=GREY, ms=4, zorder=3)
            at = np.flatnonzero(raised[:, column])
            label = f"{name}: {len(at)} rescalings"
            ax.plot(keys[at], top[at, column], marker, color=COLORS[color], mec=INK, mew=0.7, ms=6.5, zorder=4)
            ax.plot([], [], marker, ls="-", color=COLORS[color], mec=INK, mew=0.7, ms=6.5, label=label)
        ax.plot([], [], ".", color=GREY, ms=5, label="the run's own maximum")
        ax.set_title(words)
        ax.set(xlabel="keys seen", xlim=(0, keys[-1]))
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        ax.legend(loc="upper left", handlelength=1.6)
    axes[0].set_ylabel("score, in powers of two")
    set_titles(fig, title, COUNTED)
    return fig, axes


def recorded_wins(
    attention: Sequence[Row],
    encoder: Sequence[Row],
    backends: Mapping[str, str],
    towers: Mapping[str, str],
    *,
    title: str,
    subtitle: str,
) -> tuple[Figure, Sequence[Axes]]:
    """Left, recorded times of attention; right, whole forwards as a share of a product's rate; a line is a case.

    Args:
        attention: rows of a record with `latency_ms_*`; at the right stands how many times faster ours is.
        encoder: rows of a record with `latency_ms_*` and `peak_share`; at the right stand the forwards' seconds.
        backends, towers: the records' variants -> names in the legend, up to three each, ours last. A tower that the
            record does not have is left out.
    """
    fig, (left, right) = new_figure(12, 4.9, ncols=2, width_ratios=(1.12, 1))
    cases, styles = by_case(attention, backends), _MARKS[-len(backends) :]
    *_, theirs, ours = backends
    ratios = [case[theirs]["latency_ms_p50"] / case[ours]["latency_ms_p50"] for case in cases.values()]
    marks = [recorded_times(cases, *names, style) for names, style in zip(backends.items(), styles, strict=True)]
    draw_lines(left, _case_labels(cases), marks, notes=[f"{ratio:.1f}x" for ratio in ratios])
    log_axis(left, "attention of one layer, ms", ticks=(1, 2, 5))

    recorded = {row["variant"] for row in encoder}
    towers = {name: label for name, label in towers.items() if name in recorded}
    cases, marks = by_case(encoder, towers), []
    for (name, label), style in zip(towers.items(), _MARKS[-len(towers) :], strict=True):
        time, share = recorded_times(cases, name, label, style), [case[name]["peak_share"] for case in cases.values()]
        work = np.array(share) * time.middle
        marks.append(Marks(label, share, style, low=work / time.high, high=work / time.low))
    seconds = [" / ".join(f"{case[name]['latency_ms_p50'] / 1e3:.2f}" for name in towers) for case in cases.values()]
    draw_lines(right, _case_labels(cases), marks, notes=[f"{words} s" for words in seconds])
    right.set(xlim=(0, 1.06), xlabel="whole encoder: share of a square product's rate")
    right.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    set_titles(fig, title, subtitle)
    return fig, (left, right)


@dataclass(frozen=True)
class Loop:
    """One loop of a nest: its words, what stays while it runs, the bytes of that, and the level that holds them."""

    words: str
    stays: str
    nbytes: int
    level: str


@dataclass(frozen=True)
class Operand:
    """One matrix of a product: its name, rows, columns, and where it comes from."""

    name: str
    rows: int
    columns: int
    words: str


_LEVELS = {"memory": "sand", "second": "sky", "first": "orange", "registers": "navy"}


def loop_nest(loops: Sequence[Loop], *, title: str, subtitle: str) -> tuple[Figure, Axes]:
    """Loops as nested boxes from outside to inside; beside each, what stays while it runs and in which level.

    Args:
        loops: from the outermost; `level` is "memory", "second", "first" or "registers".
    """
    fig, ax = new_figure(10, 0.66 * len(loops) + 1.4)
    for depth, loop in enumerate(loops):
        left, bottom, top = 0.25 * depth, 0.07 * depth, len(loops) - depth
        color = COLORS[_LEVELS[loop.level]]
        ax.add_patch(
            Rectangle((left, bottom), 5.6 - 0.07 * depth - left, top - bottom, fc="white", ec=INK, lw=1.1, zorder=depth)
        )
        ax.text(left + 0.15, top - 0.42, loop.words, va="center", fontsize=11, zorder=20)
        ax.add_patch(Rectangle((6.0, top - 0.78), 0.35, 0.62, fc=color, ec=INK, lw=0.8))
        size = f"{loop.nbytes / 1024:,.0f} KiB" if loop.nbytes < 2**20 else f"{loop.nbytes / 2**20:.1f} MiB"
        ax.text(6.5, top - 0.46, f"{loop.stays}: {size}", va="center", fontsize=11)
        ax.plot([5.6 - 0.07 * depth, 6.0], [top - 0.46] * 2, color=GREY, lw=0.9, ls=(0, (3, 2)))
    names = {"memory": "memory", "second": "second-level cache", "first": "first-level cache", "registers": "registers"}
    handles = [Patch(fc=COLORS[color], ec=INK, lw=0.8, label=names[name]) for name, color in _LEVELS.items()]
    ax.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=4)
    ax.set(xlim=(-0.05, 10.2), ylim=(-0.15, len(loops) + 0.1))
    ax.axis("off")
    set_titles(fig, title, subtitle)
    return fig, ax


def operand_chain(
    products: Mapping[str, tuple[Operand, Operand, Operand]], *, title: str, subtitle: str
) -> tuple[Figure, Sequence[Axes]]:
    """Matrix products as rectangles of their shapes, one line a product: A times B gives the result.

    Args:
        products: words -> (A, B, result); rows and columns are drawn to one scale.
    """
    fig, axes = new_figure(9.6, 2.9 * len(products) + 0.7, nrows=len(products), squeeze=False)
    for ax, (words, (a, b, result)) in zip(axes[:, 0], products.items(), strict=True):
        left = 0.0
        for operand, color, sign in ((a, "navy", "times"), (b, "orange", "="), (result, "sky", "")):
            middle = left + operand.columns / 2
            box = Rectangle((left, -operand.rows / 2), operand.columns, operand.rows, fc=COLORS[color], ec=INK, lw=1)
            ax.add_patch(box)
            ax.text(middle, operand.rows / 2 + 6, operand.name, ha="center", va="bottom", fontsize=12.5)
            ax.text(middle, -operand.rows / 2 - 6, operand.words, ha="center", va="top", fontsize=9.5)
            left += operand.columns + 74
            ax.text(left - 37, 0, sign, ha="center", va="center", fontsize=11.5)
        ax.set(xlim=(-60, 320), ylim=(-58, 58), aspect="equal", title=words)
        ax.axis("off")
    set_titles(fig, title, subtitle)
    return fig, axes[:, 0]


def _case_labels(cases: Cases) -> list[str]:
    return [f"{case_words(name)}\n{next(iter(case.values()))['patches']:,.0f} patches" for name, case in cases.items()]
