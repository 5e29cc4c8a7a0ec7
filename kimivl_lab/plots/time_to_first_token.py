"""Time to first token: its stages, its growth with the load, one test request by request, its tail, and luck.

Test: tests/test_plots.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..lessons.time_to_first_token import EngineKnee
from .lines import Marks, draw_lines, mark
from .style import COLORS, GREY, INK, name_lines, new_figure, set_titles

_STAGES = (("sand", ""), ("blue", ""), ("orange", "///"), ("navy", ""))
_CURVES = (("mean", "navy", "-", "o"), ("median", "blue", "--", "s"), ("P99", "orange", "-.", "^"))


def stacked_stages(
    bars: Mapping[str, Mapping[str, float]], *, title: str, subtitle: str, axis: str = "time, ms"
) -> tuple[Figure, Axes]:
    """One bar for each entry, from the top down: its stages one behind the other, and their sum at its end.

    The longest entry gives the order of the stages; other entries may lack some.
    """
    fig, ax = new_figure(9.5, 0.62 * len(bars) + 2.0)
    stages = list(max(bars.values(), key=len))
    ends = np.zeros(len(bars))
    for stage, (color, hatch) in zip(stages, _STAGES, strict=False):
        widths = np.array([bar.get(stage, 0.0) for bar in bars.values()])
        ax.barh(
            range(len(bars)), widths, left=ends, height=0.6, label=stage, color=COLORS[color], hatch=hatch, ec="white"
        )
        ends = ends + widths
    for level, end in enumerate(ends):
        ax.annotate(f"{end:,.0f}", (end, level), (6, 0), textcoords="offset points", va="center")
    ax.set(yticks=range(len(bars)), yticklabels=list(bars), ylim=(len(bars) - 0.45, -0.55), xlabel=axis)
    ax.margins(x=0.08)
    name_lines(ax)
    ax.legend(loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=len(stages), columnspacing=1.3, handlelength=1.4)
    set_titles(fig, title, subtitle)
    return fig, ax


def knee(
    utilisations: Sequence[float],
    curves: Mapping[str, Sequence[float]],
    measured: Mapping[float, Mapping[str, float]],
    *,
    title: str,
    subtitle: str,
) -> tuple[Figure, Axes]:
    """TTFT over utilisation, in services: a line for each statistic as simulated, a mark for each as measured.

    Args:
        curves: "mean", "median" and "P99" -> values at the utilisations.
        measured: utilisation -> some of these statistics.
    """
    fig, ax = new_figure(9.5, 4.6)
    for name, color, line, marker in _CURVES:
        ax.plot(utilisations, curves[name], color=COLORS[color], ls=line, label=f"{name}, simulated")
        found = {at: one[name] for at, one in measured.items() if name in one}
        if found:
            ax.plot(
                list(found), list(found.values()), marker, color=COLORS[color], mec=INK, ms=9, label=f"{name}, measured"
            )
    ax.set_yscale("log")
    ax.set(xlabel="utilisation: share of the time in which the server is busy", ylabel="TTFT, in services")
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_yticks([1, 2, 5, 10, 20, 50])
    ax.minorticks_off()
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    ax.legend(loc="upper left", ncols=1)
    set_titles(fig, title, subtitle)
    return fig, ax


def request_by_request(
    intended: Sequence[float], sent: Sequence[float], answered: Sequence[float], *, title: str, subtitle: str
) -> tuple[Figure, Axes]:
    """One line for each request, from the top down: the wait until it is sent, then its service."""
    fig, ax = new_figure(9.5, 4.4)
    begin, middle, end = (np.asarray(times, dtype=float) for times in (intended, sent, answered))
    numbers = np.arange(1, len(begin) + 1)
    ax.barh(numbers, middle - begin, left=begin, height=0.75, color=COLORS["orange"], label="waits to be sent")
    ax.barh(numbers, end - middle, left=middle, height=0.75, color=COLORS["navy"], label="is served")
    ax.plot(begin, numbers, "|", color=INK, ms=5, mew=1.2, label="should arrive")
    ax.set(xlabel="time since the start of the test, s", ylabel="request", ylim=(len(begin) + 1, 0))
    ax.legend(loc="lower left", ncols=1)
    set_titles(fig, title, subtitle)
    return fig, ax


def tails(
    times: Mapping[str, np.ndarray], statistics: Mapping[str, Mapping[str, float]], *, title: str, subtitle: str
) -> tuple[Figure, Axes]:
    """The share of requests that take longer than a time, one line for each server.

    Args:
        times: server -> times in ms.
        statistics: server -> its "mean" and "P99" in ms, marked on its line.
    """
    fig, ax = new_figure(9.5, 4.3)
    for (name, values), (color, line) in zip(times.items(), (("orange", "--"), ("navy", "-")), strict=False):
        ordered = np.sort(values)
        shares = 1 - np.arange(1, len(ordered) + 1) / len(ordered)
        ax.plot(ordered[:-1], shares[:-1], color=COLORS[color], ls=line, label=name)
        for statistic, marker in (("mean", "o"), ("P99", "^")):
            at = statistics[name][statistic]
            ax.plot(at, (values > at).mean(), marker, color=COLORS[color], mec=INK, ms=10)
            right = at == max(one[statistic] for one in statistics.values())
            ax.annotate(
                f"{statistic} {at:,.0f}",
                (at, (values > at).mean()),
                (8, 6) if right else (-8, -6),
                textcoords="offset points",
                ha="left" if right else "right",
                va="bottom" if right else "top",
            )
    ax.set_yscale("log")
    ax.set(xlabel="TTFT, ms", ylabel="requests that take longer", ylim=(5e-4, 1.3), xlim=(0, None))
    ax.set_yticks([1, 0.1, 0.01, 0.001])
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.1%}".replace(".0%", "%"))
    ax.legend(loc="upper right")
    set_titles(fig, title, subtitle)
    return fig, ax


def luck(
    ways: Mapping[str, Mapping[str, np.ndarray]], true: Mapping[str, float], *, title: str, subtitle: str
) -> tuple[Figure, Axes]:
    """The ratio of two servers as many tests find it: the median, and 5 to 95 % of the tests as a line.

    Args:
        ways: way to test -> statistic -> the ratio that each test found.
        true: statistic -> the ratio after very many requests.
    """
    fig, ax = new_figure(9.5, 3.6)
    names, marks = list(true), []
    levels = np.arange(len(names))[::-1]
    ax.vlines(list(true.values()), levels - 0.3, levels + 0.3, color=GREY, lw=2.5, label="very many requests")
    for (way, found), (color, shape) in zip(ways.items(), (("orange", "s"), ("navy", "o")), strict=True):
        low, middle, high = (np.array([np.quantile(found[name], q) for name in names]) for q in (0.05, 0.5, 0.95))
        marks.append(Marks(way, middle, mark(color, shape, 9), low, high))
    draw_lines(ax, names, marks, lanes=0.26)
    ax.axvline(1, color=INK, lw=1, ls=":")
    ax.set_xlabel("TTFT of the faster server / TTFT of the slower one")
    set_titles(fig, title, subtitle)
    return fig, ax


def faster_encoder(
    factors: Sequence[float], ttft_ms: Mapping[str, Sequence[float]], *, title: str, subtitle: str
) -> tuple[Figure, Axes]:
    """TTFT over how many times faster the encoder is, one line for each load, in the order of `ttft_ms`."""
    fig, ax = new_figure(9.5, 4.2)
    styles = (("sky", "-", "o"), ("blue", "--", "s"), ("navy", "-.", "^"), ("orange", ":", "D"))
    for (name, values), (color, line, marker) in zip(ttft_ms.items(), styles, strict=False):
        ax.plot(range(len(factors)), values, ls=line, marker=marker, color=COLORS[color], mec=INK, ms=8, label=name)
    labels = ["no time" if np.isinf(factor) else f"{factor:g}x" for factor in factors]
    ax.set(xticks=range(len(factors)), xticklabels=labels, xlabel="the encoder is so many times as fast")
    ax.set(ylabel="mean TTFT, ms", ylim=(0, None))
    ax.legend(loc="upper right")
    set_titles(fig, title, subtitle)
    return fig, ax


def engine_knees(workloads: Mapping[str, Mapping[str, EngineKnee]], *, title: str, subtitle: str) -> tuple[Figure, Any]:
    """One panel for each workload: the mean TTFT over the load, simulated as lines and measured as marks."""
    fig, axes = new_figure(10, 4.6, ncols=len(workloads), squeeze=False)
    styles = {"vllm": ("orange", "--", "s"), "metadata": ("sky", "-.", "^"), "tower": ("navy", "-", "o")}
    for ax, (workload, variants) in zip(axes[0], workloads.items(), strict=True):
        for place, (variant, knee_of) in enumerate(variants.items()):
            color, line, marker = styles[variant]
            ax.plot(*knee_of.predicted.values(), ls=line, color=COLORS[color])
            shares, times, low, high = (np.array(column) for column in knee_of.measured.values())
            spread = [times - low, high - times]
            shares = shares + 0.012 * (place - 1)  # side by side
            ax.errorbar(shares, times, spread, fmt=marker, color=COLORS[color], ecolor=INK, mec=INK, ms=8, lw=1.3)
            ax.plot([], [], ls=line, marker=marker, color=COLORS[color], mec=INK, ms=8, label=variant)
        ax.set(title=workload, xlabel="rate, as a share of the capacity", ylim=(0, None))
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes[0, 0].set_ylabel("mean TTFT, ms")
    axes[0, 0].legend(loc="upper left")
    set_titles(fig, title, subtitle)
    return fig, axes[0]
