"""What a captured graph saves and what it costs: launches on a timeline, budgets over images, measured replays.

Test: tests/test_plots.py.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator, PercentFormatter

from ..measure.timing import Timing
from .lines import Marks, draw_lines, log_axis, mark
from .style import COLORS, COUNTED, GREY, INK, new_figure, set_titles

if TYPE_CHECKING:
    from ..planner.workload import TokenCounts

Spans: TypeAlias = Sequence[tuple[float, float]]  # (start, length)

_PREDICTED = (("navy", "--"), ("blue", ":"))
_FILLS = (("sky", "^", 9), ("orange", "s", 8), ("navy", "o", 8))
_WASTE: dict[str, Any] = {"fc": COLORS["orange"], "hatch": "////", "ec": "white", "lw": 0}


def launch_timeline(lanes: Mapping[str, tuple[Spans, Spans]], *, title: str, subtitle: str) -> tuple[Figure, Axes]:
    """One lane for each program: the host's launches above the device's kernels, hatched where the device waits.

    Args:
        lanes: words -> (launches, kernels), each (start, length) in launches.
    """
    fig, ax = new_figure(10.5, 0.92 * len(lanes) + 1.55)
    ticks: dict[float, str] = {}
    last = max(start + length for _, kernels in lanes.values() for start, length in kernels)
    for at, (words, (launches, kernels)) in enumerate(lanes.items()):
        host, device = 2.5 * at, 2.5 * at + 0.9
        ax.broken_barh(launches, (host - 0.36, 0.72), fc=COLORS["sand"], ec=INK, lw=0.6)
        end = max(start + length for start, length in kernels)
        ax.barh(device, end, height=0.72, fc="white", ec=GREY, hatch="////", lw=0)
        ax.broken_barh(kernels, (device - 0.36, 0.72), fc=COLORS["blue"], ec="white", lw=0.6)
        busy = sum(length for _, length in kernels)
        label = f"{end:.1f} launches, device busy {busy / end:.0%}"
        ax.annotate(label, (end, device), (6, 0), textcoords="offset points", va="center", fontsize=10)
        ticks |= {host: f"{words}: host", device: "device"}
    ax.set(xlim=(0, 1.3 * last), ylim=(2.5 * len(lanes) - 1.0, -0.7), yticks=list(ticks), yticklabels=ticks.values())
    ax.set_xlabel("time, in launches of the host (hatched: the device waits)")
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", visible=False)
    set_titles(fig, title, subtitle)
    return fig, ax


def two_staircases(
    workloads: Mapping[str, "TokenCounts"],
    ladders: Mapping[str, tuple[Sequence[int], Sequence[int]]],
    words: tuple[str, str],
    *,
    title: str,
    subtitle: str = COUNTED,
) -> tuple[Figure, Sequence[Axes]]:
    """One panel for each workload: its images by merged tokens, and above them what two sets of budgets add.

    Args:
        workloads: name -> how many images have how many merged tokens.
        ladders: name -> two sets of budgets, each ascending and large enough for every image; the first wastes more.
        words: what the two sets are.
    """
    fig, axes = new_figure(3.8 * len(workloads) + 0.6, 4.7, ncols=len(workloads), squeeze=False)
    for ax, (name, workload) in zip(axes[0], workloads.items(), strict=True):
        tokens, counts = workload.tokens, workload.counts
        edges = np.concatenate(([0], counts.cumsum())) / counts.sum()
        first, second = (np.asarray(ladder)[np.searchsorted(ladder, tokens)] for ladder in ladders[name])
        lower = np.minimum(first, second)
        ax.stairs(first, edges, baseline=lower, fill=True, label=f"more with {words[0]}", **_WASTE)
        ax.stairs(second, edges, baseline=tokens, fill=True, color=COLORS["navy"], label=f"for nothing with {words[1]}")
        ax.stairs(tokens, edges, fill=True, color=COLORS["sky"], label="images, sorted by tokens")
        ax.stairs(first, edges, baseline=None, color=INK, lw=1.3, ls=(0, (4, 2)))
        ax.stairs(second, edges, baseline=None, color=INK, lw=1.5)
        before, after = ((rows @ counts) / (tokens @ counts) for rows in (first, second))
        ax.set(xlim=(0, 1), xlabel="share of the images", title=f"{name}: {before:.2f} to {after:.2f} times")
        ax.set_ylim(0, 1.04 * max(first.max(), second.max()))
        ax.xaxis.set_major_formatter(PercentFormatter(1))
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes[0, 0].set_ylabel("merged tokens of one image")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=3)
    set_titles(fig, title, subtitle)
    return fig, axes[0]


def replay_steps(
    tokens: Sequence[int],
    eager: Sequence[Timing],
    replays: Mapping[int, Timing],
    predicted: Mapping[str, Sequence[float]],
    *,
    title: str,
    subtitle: str,
) -> tuple[Figure, Axes]:
    """Time of one image by its tokens: eager as a line, graphs as steps, shaded where a step is more expensive.

    Args:
        tokens: merged tokens of the images that were timed eager, ascending.
        eager: their times.
        replays: by budget the time of one replay; the budgets ascend, and each serves what the one before does not.
        predicted: words -> ms at each of `tokens`, up to two lines.
    """
    fig, ax = new_figure(10, 5.4)
    p20, p50, p80 = (np.array([getattr(one, f"{p}_ms") for one in eager]) for p in ("p20", "p50", "p80"))
    for (words, line), (color, style) in zip(predicted.items(), _PREDICTED, strict=False):
        ax.plot(tokens, line, ls=style, color=COLORS[color], lw=1.6, label=words)
    least = min(min(tokens), min(replays)) / math.sqrt(2)
    lows = [least, *list(replays)[:-1]]
    for at, (low, (budget, timing)) in enumerate(zip(lows, replays.items(), strict=True)):
        x = np.geomspace(low, budget, 60)
        y = np.interp(np.log(x), np.log(tokens), p50)
        words = {"label": "a graph costs more than eager"} if at == 0 else {}
        ax.fill_between(x, y, timing.p50_ms, timing.p50_ms > y, **_WASTE, **words)
        ax.hlines(timing.p50_ms, low, budget, color=INK, lw=2.4, label="replay" if at == 0 else None)
        ax.vlines(budget, timing.p20_ms, timing.p80_ms, color=INK, lw=1.2)
    spread = (p50 - p20, p80 - p50)
    ax.errorbar(tokens, p50, spread, fmt="o-", color=COLORS["blue"], ms=5, lw=1.6, capsize=3, label="eager")
    ax.set(xscale="log", yscale="log", xlim=(least, 1.15 * max(replays)), ylabel="time of one image, ms")
    ax.set_xlabel("merged tokens of the image; ticks: the budgets (4 patches each)")
    ax.xaxis.set_major_locator(FixedLocator(list(replays)))
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(lambda value, _: f"{value:,g}")
    ax.legend(loc="upper left")
    set_titles(fig, title, subtitle)
    return fig, ax


def time_ratios(ratios: Mapping[str, float], *, title: str, subtitle: str) -> tuple[Figure, Axes]:
    """One line for each measurement: the time with graphs over the time without; left of 1 is faster, right slower.

    Args:
        ratios: words -> the ratio, from top to bottom.
    """
    values = np.array(list(ratios.values()))
    fig, ax = new_figure(10.5, 0.34 * len(ratios) + 1.75)
    faster = Marks("", np.where(values <= 1, values, np.nan), mark("blue", "o", 9))
    slower = Marks("", np.where(values > 1, values, np.nan), mark("orange", "s", 9))
    draw_lines(ax, list(ratios), [faster, slower], notes=[f"{ratio:.2f}" for ratio in values], stem=1)
    ax.axvline(1, color=INK, lw=1.2)
    log_axis(ax, "time with graphs / time without")
    ax.xaxis.set_major_locator(FixedLocator([0.5, 0.7, 1, 1.5, 2, 3, 5, 10]))
    set_titles(fig, title, subtitle)
    return fig, ax


def recorded_replays(rows: Sequence[Mapping[str, Any]], *, title: str, subtitle: str) -> tuple[Figure, Sequence[Axes]]:
    """Left, recorded whole calls: replay over eager by budget, a line for each filling; right, what each capture cost.

    Args:
        rows: of a record with the phases "budget", of up to three fillings, and "capture". A replay's p20 to p80 is
            over eager's median, eager's own stands at 1. Over a capture: the calls of a full budget that earn it back,
            where p20 to p80 of replay and eager do not overlap.
    """
    captures = {row["budget_tokens"]: row for row in rows if row["phase"] == "capture"}
    calls: dict[float, dict[float, dict[str, Mapping[str, Any]]]] = {}  # filling -> budget -> variant -> row
    for row in rows:
        if row["phase"] == "budget":
            filled = calls.setdefault(row["tokens"] / row["budget_tokens"], {})
            filled.setdefault(row["budget_tokens"], {})[row["variant"]] = row
    if len(calls) > len(_FILLS):
        raise ValueError(f"there are marks for {len(_FILLS)} fillings, not {len(calls)}")
    places = {budget: float(place) for place, budget in enumerate(captures)}
    fig, (left, right) = new_figure(11, 5.1, ncols=2, width_ratios=(1.2, 1))
    for at, (fill, budgets) in enumerate(sorted(calls.items())):
        (name, marker, size), x = _FILLS[at], np.array([places[budget] for budget in budgets]) + 0.09 * (at - 1)
        median = np.array([pair["eager"]["latency_ms_p50"] for pair in budgets.values()])
        eager, replay = (
            [[pair[way][f"latency_ms_{p}"] for pair in budgets.values()] / median for p in ("p20", "p50", "p80")]
            for way in ("eager", "replay")
        )
        left.vlines(x, eager[0], eager[2], color=GREY, lw=4, alpha=0.45)
        left.vlines(x, replay[0], replay[2], color=INK, lw=1.4, zorder=4)
        style = {"color": COLORS[name], "lw": 1.6, "ms": size, "mec": INK, "mew": 0.9, "zorder": 5}
        left.plot(x, replay[1], f"{marker}-", label=f"{fill:.0%} full", **style)
        if fill < 1:
            left.axhline(1 / fill, color=COLORS[name], lw=1.6, ls=(0, (4, 3)), zorder=1)
            words = f"{1 / fill:.3g} times the rows"
            left.annotate(words, (0, 1 / fill), (6, 3), ("axes fraction", "data"), "offset points", fontsize=10)
    left.axhline(1, color=INK, lw=1.2, zorder=1)
    left.plot([], [], color=GREY, lw=6, alpha=0.45, label="eager, p20 to p80")
    left.set(yscale="log", xlabel="budget, merged tokens", ylabel="whole call: time of a replay / eager")
    left.margins(y=0.1)
    left.yaxis.set_major_locator(FixedLocator([0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 4, 5]))
    left.legend(loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=4, columnspacing=1.1, handletextpad=0.4)

    costs = [row["capture_ms"] for row in captures.values()]
    right.vlines(range(len(costs)), 0.5 * min(costs), costs, color=COLORS["blue"], lw=4)
    right.plot(range(len(costs)), costs, "o", color=COLORS["blue"], ms=9, mec=INK, mew=0.9)
    for (budget, place), cost in zip(places.items(), costs, strict=True):
        full, graph = (calls[max(calls)][budget][way] for way in ("eager", "replay"))
        saved = full["latency_ms_p50"] - graph["latency_ms_p50"]
        apart = graph["latency_ms_p80"] < full["latency_ms_p20"]
        words = f"{cost / saved:,.0f}\ncalls" if apart else "spreads\noverlap"
        right.annotate(words, (place, cost), (0, 9), textcoords="offset points", ha="center", fontsize=10)
    right.set(yscale="log", ylim=(0.5 * min(costs), 2 * max(costs)), ylabel="one capture, ms")
    right.set_xlabel("budget, merged tokens (below: MiB of the pool)")
    right.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    right.set_title("Calls of a full budget that earn its capture back")
    plain = [f"{budget:,.0f}" for budget in places]
    added = [f"{budget}\n+{row['pool_mib']:.3g}" for budget, row in zip(plain, captures.values(), strict=True)]
    for ax, labels in ((left, plain), (right, added)):
        ax.set_xticks(list(places.values()), labels)
        ax.set_xlim(-0.5, len(places) - 0.5)
        ax.grid(axis="x", visible=False)
        ax.yaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    set_titles(fig, title, subtitle)
    return fig, (left, right)
