"""Kernels of one's own: the useful share of tile work, a running maximum with slack, recorded wins."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MultipleLocator, NullLocator, PercentFormatter

from ..datasets import WORKLOADS
from .style import COLORS, COUNTED, GREY, INK, LIGHT, new_figure, set_titles

_MARKS = (("orange", "s", 8), ("sky", "D", 7.5), ("navy", "o", 8.5))
_CURVES = (("orange", (0, (5, 1.6)), 1.6), ("sky", "-", 1.6), ("navy", "-", 2.8))
_QUERIES = (("sky", "^"), ("orange", "s"), ("navy", "o"))


@dataclass(frozen=True)
class Maxima:
    """A few queries' maxima, run of keys after run; each sequence is (runs, queries).

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
    ax.set(xlabel="head size, channels", ylabel="useful share of the tile work")
    ax.xaxis.set_major_locator(MultipleLocator(8))
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    ax.legend(loc="lower right")
    set_titles(fig, title, COUNTED)
    return fig, ax


def running_maxima(
    panels: Mapping[str, Maxima], queries: Sequence[str], run: int, *, title: str, slack: Sequence[float]
) -> tuple[Figure, Sequence[Axes]]:
    """Each panel: the running maximum of a few queries over the keys, a mark where it was raised.

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
    attention: Sequence[Mapping[str, Any]],
    encoder: Sequence[Mapping[str, Any]],
    backends: Mapping[str, str],
    towers: Mapping[str, str],
    *,
    title: str,
    subtitle: str,
) -> tuple[Figure, Sequence[Axes]]:
    """Left, recorded times of attention, a line a case; right, whole forwards as a share of the product's rate.

    Args:
        attention: rows of a record with `latency_ms_*`.
        encoder: rows of a record with `latency_ms_*` and `peak_share`.
        backends, towers: the records' variants -> names in the legend, up to three each, ours last.
    """
    fig, (left, right) = new_figure(11, 4.9, ncols=2, width_ratios=(1.12, 1))
    cases = _by_case(attention, backends)
    y = _lines(left, cases)
    for (color, marker, size), (variant, words) in zip(_MARKS[-len(backends) :], backends.items(), strict=True):
        p20, p50, p80 = (np.array([case[variant][f"latency_ms_{p}"] for case in cases.values()])
                         for p in ("p20", "p50", "p80"))  # fmt: skip
        left.hlines(y, p20, p80, color=INK, lw=1.4, zorder=5)
        left.plot(p50, y, marker, color=COLORS[color], ms=size, mec=INK, mew=0.9, label=words, zorder=4)
    theirs, ours = list(backends)[-2:]
    for at, case in zip(y, cases.values(), strict=True):
        ratio = case[theirs]["latency_ms_p50"] / case[ours]["latency_ms_p50"]
        left.annotate(f"{ratio:.1f}x", (max(row["latency_ms_p80"] for row in case.values()), at), (12, 0),
                      textcoords="offset points", va="center", fontsize=10.5,
                      bbox={"fc": "white", "ec": "none", "pad": 1})  # fmt: skip
    left.set_xscale("log")
    times = [row[f"latency_ms_{p}"] for case in cases.values() for row in case.values() for p in ("p20", "p80")]
    left.set(xlabel="attention of one layer, ms", xlim=(min(times) / 1.4, max(times) * 1.8))
    left.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    left.xaxis.set_minor_locator(NullLocator())
    left.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    left.legend(loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=3, columnspacing=1.3, handletextpad=0.3)

    cases = _by_case(encoder, towers)
    y = _lines(right, cases)
    for (color, marker, size), (variant, words) in zip(_MARKS[-len(towers) :], towers.items(), strict=True):
        share = np.array([case[variant]["peak_share"] for case in cases.values()])
        fast, slow = (np.array([case[variant]["latency_ms_p50"] / case[variant][f"latency_ms_{p}"]
                                for case in cases.values()]) for p in ("p20", "p80"))  # fmt: skip
        right.hlines(y, share * slow, share * fast, color=INK, lw=1.4, zorder=5)
        right.plot(share, y, marker, color=COLORS[color], ms=size, mec=INK, mew=0.9, label=words, zorder=4)
        for at, value, case in zip(y, share, cases.values(), strict=True):
            lift = 9 if variant == list(towers)[1] else -18
            right.annotate(f"{case[variant]['latency_ms_p50'] / 1e3:.2f} s", (value, at), (0, lift),
                           textcoords="offset points", ha="center", fontsize=9.5)  # fmt: skip
    right.set(xlim=(0, 1.06), xlabel="whole encoder: share of a square product's rate")
    right.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    right.legend(loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=3, columnspacing=1.3, handletextpad=0.3)
    set_titles(fig, title, subtitle)
    return fig, (left, right)


def _by_case(rows: Sequence[Mapping[str, Any]], variants: Mapping[str, str]) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Case -> variant -> row, the cases by their number of patches; rows of other variants are left out."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["patches"]):
        if row["variant"] in variants:
            found.setdefault(row["case"], {})[row["variant"]] = row
    return found


def _lines(ax: Axes, cases: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> np.ndarray:
    """Where each case's line lies, from the top down, with its name and patches at the left."""
    y = np.arange(len(cases))[::-1]
    labels = []
    for name, rows in cases.items():
        count, _, workload = name.partition(" of ")
        words = f"{count} {WORKLOADS[workload]}" if workload in WORKLOADS else re.sub(r"(\d)x(\d)", r"\1 x \2", name)
        labels.append(f"{words}\n{next(iter(rows.values()))['patches']:,.0f} patches")
    ax.hlines(y, 0, 1, color=LIGHT, lw=4, zorder=0, transform=ax.get_yaxis_transform())
    ax.set(yticks=y, yticklabels=labels, ylim=(-0.6, len(y) - 0.4))
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)
    return y
