"""Budgets as a staircase over the images that they serve; the area in between is computed and thrown away.

Test: tests/test_plots.py.
"""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from .style import COLORS, COUNTED, GREY, INK, name_lines, new_figure, set_titles

if TYPE_CHECKING:
    from ..graphs.packing import Replay
    from ..planner.plan import BudgetPlan
    from ..planner.workload import TokenCounts

_BARS = (("orange", "///"), ("sky", "..."), ("navy", ""))


def packed_replays(
    tokens: Sequence[int], replays: Mapping[str, Sequence["Replay"]], *, title: str, subtitle: str = COUNTED
) -> tuple[Figure, Axes]:
    """One line for each replay, to scale: its images with their tokens, and hatched the rows that the budget adds.

    Args:
        tokens: merged tokens of each image of the call.
        replays: words -> the call packed, from top to bottom.
    """
    lines = sum(map(len, replays.values())) + 0.7 * (len(replays) - 1)
    fig, ax = new_figure(10, 0.36 * lines + 1.5)
    longest = max(replay.rows for packed in replays.values() for replay in packed)
    y, places = 0.0, []
    for words, packed in replays.items():
        real, rows = sum(replay.tokens for replay in packed), sum(replay.rows for replay in packed)
        places.append((y + (len(packed) - 1) / 2, f"{words}\n{rows / real:.2f} rows a real row"))
        for replay in packed:
            x = 0
            for image, color in zip(replay.images, cycle(("blue", "sky")), strict=False):
                ax.barh(y, tokens[image], left=x, color=COLORS[color], ec="white", height=0.78)
                if tokens[image] > longest / 30:
                    ink = "white" if color == "blue" else INK
                    ax.text(x + tokens[image] / 2, y, f"{tokens[image]:,}", ha="center", va="center", color=ink, size=9)
                x += tokens[image]
            ax.barh(y, replay.rows - x, left=x, color=COLORS["orange"], hatch="////", ec="white", lw=0, height=0.78)
            label = "eager" if replay.budget is None else f"{replay.budget:,}"
            ax.annotate(label, (replay.rows, y), (4, 0), textcoords="offset points", va="center", fontsize=9.5)
            y += 1
        y += 0.7
    ax.set(yticks=[at for at, _ in places], yticklabels=[words for _, words in places])
    ax.set(
        ylim=(y - 0.7 - 0.4, -0.6), xlim=(0, 1.08 * longest), xlabel="merged tokens; at the end of a line its budget"
    )
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    name_lines(ax)
    set_titles(fig, title, subtitle)
    return fig, ax


def plan_overview(
    name: str, workload: "TokenCounts", plans: Mapping[str, "BudgetPlan"]
) -> tuple[Figure, Sequence[Axes]]:
    """A workload's plans side by side: vLLM's own budgets, the planned ones, the time of all, and what a graph buys.

    Args:
        plans: "vllm" and "lab", as `plan_budgets` makes them.
    """
    before, after = plans["vllm"].powers_of_two, plans["vllm"]
    assert before is not None
    fig, axes = new_figure(17, 4.9, ncols=4, width_ratios=(1, 1, 1.15, 0.75))
    axes[1].sharey(axes[0])
    axes[1].tick_params(labelleft=False)
    for ax, plan, words in zip(axes, (before, after), ("vLLM's own budgets", "planned for vLLM"), strict=False):
        _draw_staircase(ax, workload.tokens, workload.counts, plan.budgets, words)
    axes[0].set_ylabel("merged tokens of one image")
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower left", ncols=2)
    sets = {"vLLM's own": before, "planned for vLLM": after, "planned, this library": plans["lab"]}
    _draw_times(axes[2], sets)
    _draw_number_of_graphs(axes[3], after, before)
    subtitle = (
        "staircases: counted, one image a call, areas to scale  ·  time: predicted, not measured; a replay costs "
    )
    subtitle += f"{after.replay_cost} rows beside its own"
    set_titles(fig, f"{name}: CUDA-graph budgets for {workload.images:,} images", subtitle)
    return fig, axes


def _serving(tokens: np.ndarray, ladder: Sequence[int]) -> np.ndarray:
    """(m,) rows computed for each image: the smallest budget that holds it, or its own tokens where it runs eager."""
    steps = np.searchsorted(ladder, tokens)
    return np.append(ladder, 0)[steps] + np.where(steps == len(ladder), tokens, 0)


def _draw_staircase(ax: Axes, tokens: np.ndarray, counts: np.ndarray, ladder: Sequence[int], words: str) -> None:
    edges = np.concatenate(([0], counts.cumsum())) / counts.sum()
    rows = _serving(tokens, ladder)
    ax.stairs(
        rows,
        edges,
        baseline=tokens,
        fill=True,
        fc=COLORS["orange"],
        hatch="////",
        ec="white",
        lw=0,
        label="computed for nothing",
    )
    ax.stairs(tokens, edges, fill=True, color=COLORS["blue"], label="images, sorted by tokens")
    ax.stairs(rows, edges, baseline=None, color=INK, lw=1.6)
    shown = np.inf
    for budget in np.intersect1d(rows, ladder)[::-1]:
        if shown - budget > rows.max() / 22:
            ax.annotate(f"{budget:,}", (1, budget), (4, 0), textcoords="offset points", va="center", fontsize=9.5)
            shown = budget
    waste = (rows @ counts) / (tokens @ counts)
    eager = counts[tokens > max(ladder)].sum() / counts.sum()
    title = f"{words}: {waste:.2f} times the real rows" + (
        f",\n{eager:.1%} of the images without a graph" if eager else ""
    )
    ax.set(xlim=(0, 1), xlabel="share of the images", title=title)
    ax.xaxis.set_major_formatter(PercentFormatter(1))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _draw_times(ax: Axes, plans: Mapping[str, "BudgetPlan"]) -> None:
    """Predicted time over the first plan's, by images a call; beside it the replays that a call becomes."""
    height = 0.84 / len(plans)
    own = next(iter(plans.values()))
    longest = max(plan.time[images] / own.time[images] for plan in plans.values() for images in own.time)
    for place, ((color, hatch), (words, plan)) in enumerate(zip(_BARS, plans.items(), strict=False)):
        y = np.arange(len(own.time)) + (place - (len(plans) - 1) / 2) * height
        times = [plan.time[images] / own.time[images] for images in own.time]
        ax.barh(y, times, 0.9 * height, color=COLORS[color], hatch=hatch, ec="white", lw=0)
        for at, time, images in zip(y, times, own.time, strict=True):
            label = f"{time:.2f}  {words}: {plan.replays_a_call[images]:.1f} replays"
            label += f", {plan.eager[images]:.0%} eager" if plan.eager[images] else ""
            ax.annotate(label, (longest, at), (6, 0), textcoords="offset points", va="center", fontsize=9.5)
    ax.axvline(1, color=INK, lw=1)
    ax.set(yticks=range(len(own.time)), yticklabels=list(own.time), ylabel="images a call", xlim=(0, 2.2 * longest))
    ax.set(ylim=(len(own.time) - 0.5, -0.5), xlabel="predicted time, vLLM's own = 1", title="time by images a call")
    ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", visible=False)
    ax.spines["left"].set_color(GREY)


def _draw_number_of_graphs(ax: Axes, plan: "BudgetPlan", own: "BudgetPlan") -> None:
    """Predicted time by number of graphs, and where the plan stands."""
    base = np.mean(list(own.time.values()))
    numbers, times = list(plan.by_graphs), np.array(list(plan.by_graphs.values())) / base
    ax.plot(numbers, times, marker="o", ms=5, color=COLORS["blue"])
    chosen = numbers.index(len(plan.budgets))
    ax.plot(numbers[chosen], times[chosen], "D", ms=9, color=COLORS["orange"], mec=INK, label="this plan")
    ax.axhline(1, color=INK, lw=1)
    ax.set(ylim=(0, 1.08 * max(1, *times)), xlabel="graphs", title="one graph more")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend(loc="lower right")
