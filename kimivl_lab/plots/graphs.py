"""What a captured graph saves and what it costs: launches on a timeline, budgets over images, measured replays.

Test: tests/test_plots.py.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator, PercentFormatter

from ..measure.timing import Timing
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


def request_to_output(
    lengths: Sequence[int],
    budget: int,
    offsets: Sequence[int],
    shapes: Mapping[str, str],
    operators: int,
    *,
    title: str,
    subtitle: str = COUNTED,
) -> tuple[Figure, Axes]:
    """The way of one request through a graph: images, static inputs, program, static output, new tensor.

    Args:
        lengths: patches of each image of the request.
        budget: merged tokens of the graph; its rows are 4 times as many patches.
        offsets: `cu_seqlens` as the graph reads it.
        shapes: of the static inputs that have one line a patch, by name.
        operators: of the program.
    """
    fig, ax = new_figure(11, 5.2)
    ax.set(xlim=(0, 110), ylim=(0, 47))
    ax.axis("off")
    used = sum(lengths) / (4 * budget)
    words = {"font": "monospace", "fontsize": 9.5, "va": "center"}
    for x, heading in ((1, "request"), (24, "static inputs"), (67, "program"), (87, "static output")):
        ax.text(x, 45, heading, weight="bold", va="center")
    for at, (length, color) in enumerate(zip(lengths, cycle(("blue", "sky")), strict=False)):
        y, height = 34 - 14 * at, 7 * math.sqrt(length / max(lengths))
        ax.add_patch(Rectangle((1, y - height / 2), 1.4 * height, height, fc=COLORS[color], ec=INK, lw=0.8))
        ax.text(1, y - height / 2 - 1.8, f"image {at}: {length} patches", fontsize=10, va="center")
    for at, (name, shape) in enumerate(shapes.items()):
        y = 39 - 6.6 * at
        ax.text(24, y + 2.6, f"{name} {shape}", **words)
        _bar(ax, 24, y - 1.2, 36, 2.4, lengths, 4 * budget)
    y = 39 - 6.6 * len(shapes)
    ax.text(24, y - 1.2, f"cu_seqlens ({len(offsets)},): where each segment begins", **words)
    for offset in offsets:
        ax.text(24 + 36 * offset / offsets[-1], y + 1.6, str(offset), fontsize=9.5, ha="center", va="center")
    for offset in offsets[1:-1]:
        ax.plot([24 + 36 * offset / offsets[-1]] * 2, [y + 5, y + 2.9], color=INK, lw=0.9)
    ax.add_patch(Rectangle((67, 12), 13, 28, fc=COLORS["sand"], ec=INK, lw=1.2))
    frozen = f"{operators} operators,\n1 launch\n\nfrozen:\noperators,\nshapes,\naddresses,\nmax_seqlen\n= {4 * budget}"
    ax.text(73.5, 26, frozen, ha="center", va="center", fontsize=10, linespacing=1.35)
    ax.text(87, 36.6, f"{budget} tokens", **words)
    _bar(ax, 87, 32, 20, 2.4, lengths, 4 * budget)
    ax.text(87, 18.6, f"new tensor, {sum(lengths) // 4} tokens", **words)
    _bar(ax, 87, 14, 20 * used, 2.4, lengths, sum(lengths))
    for start, end, name, place in (
        ((16, 25), (22.5, 25), "copy in", (19, 26.8)),
        ((61, 25), (66, 25), "read", (63.5, 26.8)),
        ((80.5, 33), (86, 33), "write", (83.2, 34.8)),
        ((90, 31), (90, 20.5), "copy out", (95, 25.8)),
    ):
        ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=14, color=INK, lw=1.5))
        ax.text(*place, name, ha="center", va="center", fontsize=10)
    ax.add_patch(Rectangle((24, 0.8), 4, 2.4, **_WASTE))
    ax.text(29, 2, "padding: computed, and not read by any image", va="center", fontsize=10)
    set_titles(fig, title, subtitle)
    return fig, ax


def _bar(ax: Axes, x: float, y: float, width: float, height: float, lengths: Sequence[int], rows: int) -> None:
    """Images side by side, to scale, and hatched what is left of `rows`."""
    left = x
    for length, color in zip(lengths, cycle(("blue", "sky")), strict=False):
        ax.add_patch(Rectangle((left, y), width * length / rows, height, fc=COLORS[color], ec="white", lw=0.8))
        left += width * length / rows
    if x + width - left > 1e-6:
        ax.add_patch(Rectangle((left, y), x + width - left, height, **_WASTE))


def recorded_replays(rows: Sequence[Mapping[str, Any]], *, title: str, subtitle: str) -> tuple[Figure, Sequence[Axes]]:
    """Left, recorded whole calls: replay over eager by budget, a line for each filling; right, what pays a capture.

    Args:
        rows: of a record with the phases "budget", of up to three fillings, and "capture". A replay's p20 to p80 is
            over eager's median, eager's own stands at 1. A budget has no mark on the right where p20 to p80 of a full
            replay and of eager overlap: its saving is not known.
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

    paid: dict[float, float] = {}
    for budget, row in captures.items():
        full, graph = (calls[max(calls)][budget][way] for way in ("eager", "replay"))
        if graph["latency_ms_p80"] < full["latency_ms_p20"]:
            paid[budget] = row["capture_ms"] / (full["latency_ms_p50"] - graph["latency_ms_p50"])
    top = 2 * max(paid.values(), default=1)
    for budget, place in places.items():
        if budget in paid:
            right.bar(place, paid[budget], width=0.5, color=COLORS["blue"])
            words = {"ha": "center", "fontsize": 10, "textcoords": "offset points"}
            right.annotate(f"{paid[budget]:,.0f}", (place, paid[budget]), (0, 4), **words)
        else:
            right.text(place, 1.25, "no saving\nmeasured", ha="center", fontsize=9.5, color=GREY)
    right.set(yscale="log", ylim=(1, top), ylabel="calls of a full budget", xlabel="budget, merged tokens")
    right.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
    right.set_title("Calls until a capture has paid for itself")
    for ax in (left, right):
        ax.set_xticks(list(places.values()), [f"{budget:,.0f}" for budget in places])
        ax.set_xlim(-0.5, len(places) - 0.5)
        ax.grid(axis="x", visible=False)
        ax.yaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    set_titles(fig, title, subtitle)
    return fig, (left, right)
