"""Encoding on several ranks: which rank holds what, encodes which image and waits; what is sent; recorded times.

Test: tests/test_plots.py.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Circle, FancyArrowPatch, Rectangle

from ..config import MoonViTConfig
from .lines import Row, by_case, case_words, draw_lines, mark, recorded_times
from .style import COLORS, COUNTED, GREY, INK, new_figure, set_titles

_RANKS = ((COLORS["navy"], ""), (COLORS["orange"], "///"), (COLORS["sky"], "..."), (COLORS["sand"], "xxx"))
_STEPS = {"": 0.8, "gelu": 1.35, "attention": 1.95, "all-reduce": 2.3, "gather": 1.9}  # lengths of the arrows
_SIGNS = {"all-reduce": "+", "gather": "||"}
_SIZES = LinearSegmentedColormap.from_list("sizes", [COLORS[name] for name in ("sand", "sky", "blue", "navy")])
_MODES = {
    "single": ("one rank", mark("sky", "D", 6.5)),
    "data": ("data parallel", mark("navy", "o", 7.5)),
    "tensor": ("tensor parallel", mark("orange", "s", 7)),
    "auto": ("auto", mark("sand", "^", 8)),
}
_PATCHES = 2.1  # height of an activation, in hidden sizes
_SHIFT = 0.11  # of one copy behind another


def who_holds_what(config: MoonViTConfig, ranks: int, title: str) -> tuple[Figure, Sequence[Axes]]:
    """One layer as y = x W, cut over ranks: above tensor parallel, below data parallel; a colour is a rank.

    Args:
        config: its matrices are drawn to scale; activations stand for any number of patches.
        ranks: 2 to 4.
    """
    if not 2 <= ranks <= len(_RANKS):
        raise ValueError(f"the figure has room for 2 to {len(_RANKS)} ranks, not {ranks}")
    fig, axes = new_figure(10.5, 5.9, nrows=2)
    wide = config.intermediate_size / config.hidden_size
    # name, shape, width, height, its cut when tensor parallel and when data parallel, the way to the next
    tensors = (
        ("x", "L x D", 1, _PATCHES, "shared", "rows", ""),
        ("wqkv", "D x 3D", 3, 1, "heads", "copies", ""),
        ("q, k, v", "L x 3D", 3, _PATCHES, "heads", "rows", "attention"),
        ("wo", "D x D", 1, 1, "rows", "copies", "all-reduce"),
        ("x", "L x D", 1, _PATCHES, "shared", "rows", ""),
        ("fc0", "D x F", wide, 1, "columns", "copies", "gelu"),
        ("hidden", "L x F", wide, _PATCHES, "columns", "rows", ""),
        ("fc1", "F x D", 1, wide, "rows", "copies", "all-reduce"),
        ("x", "L x D", 1, _PATCHES, "shared", "rows", "gather"),
    )
    total = sum(width + _STEPS[step] for _, _, width, *_, step in tensors)
    sentences = (
        "Tensor parallel: each matrix is cut, each rank works on all patches, two all-reduces in a block",
        "Data parallel: each rank has all matrices and the patches of its own images, one gather after the last block",
    )
    for ax, sentence in zip(axes, sentences, strict=True):
        tensor_parallel = ax is axes[0]
        ax.set(xlim=(-0.1, total), ylim=(-wide / 2 - 0.95, wide / 2 + 0.75), aspect="equal", title=sentence)
        ax.set_axis_off()
        x = 0.0
        for name, shape, width, height, cut, data_cut, step in tensors:
            _draw_tensor(ax, x, width, height, cut if tensor_parallel else data_cut, ranks)
            low = -height / 2 - 0.2 - (0 if tensor_parallel else _SHIFT * (ranks - 1) * (data_cut == "copies"))
            ax.text(x + width / 2, height / 2 + 0.22, name, ha="center", va="bottom", fontweight="bold", fontsize=10)
            ax.text(x + width / 2, low, shape, ha="center", va="top", fontsize=9, color=GREY)
            meets = "all-reduce" if tensor_parallel else "gather"
            _draw_step(ax, x + width, _STEPS[step], step if step == meets or step not in _SIGNS else "")
            x += width + _STEPS[step]
    shown = [f"rank {rank}" for rank in range(ranks)]
    handles = [Rectangle((0, 0), 1, 1, fc=color, hatch=hatch, ec=INK, lw=0.6) for color, hatch in _RANKS[:ranks]]
    handles.append(Rectangle((0, 0), 1, 1, fc="white", ec=GREY, lw=1.2))
    fig.legend(handles, [*shown, "the same on every rank"], loc="outside lower left", ncols=ranks + 1, handlelength=1.6)
    words = f"one block, y = x W, matrices to scale (D = {config.hidden_size:,}, F = {config.intermediate_size:,})"
    set_titles(fig, title, words)
    return fig, axes


def schedule(
    panels: Mapping[str, Sequence[Sequence[tuple[int, float]]]],
    bound: float,
    *,
    axis: str,
    title: str,
    subtitle: str,
) -> tuple[Figure, Sequence[Axes]]:
    """Images over ranks as a Gantt chart, one panel for each balance: a bar is an image, hatched is a rank that waits.

    Args:
        panels: name of a balance -> for each rank its images (patches, time), in order.
        bound: no balance can be faster; drawn as an upright line.
        axis: what the times are, with their unit.
    """
    count = max(len(ranks) for ranks in panels.values())
    fig, axes = new_figure(10, (0.3 * count + 0.7) * len(panels) + 1.55, nrows=len(panels), sharex=True, squeeze=False)
    axes = list(axes[:, 0])
    engine = fig.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    engine.set(h_pad=0.09)
    sizes = [patches for ranks in panels.values() for images in ranks for patches, _ in images]
    norm = Normalize(0, max(sizes))
    ends = {name: [sum(time for _, time in images) for images in ranks] for name, ranks in panels.items()}
    right = 1.04 * max(max(each) for each in ends.values())
    for ax, (name, ranks) in zip(axes, panels.items(), strict=True):
        last = max(ends[name])
        for rank, images in enumerate(ranks):
            start = 0.0
            for patches, time in images:
                color = _SIZES(norm(patches))
                ax.barh(rank, time, left=start, height=0.74, color=color, ec="white", lw=0.8)
                if time > 0.034 * right:
                    ink = "white" if norm(patches) > 0.55 else INK
                    ax.text(start + time / 2, rank, f"{patches:,}", ha="center", va="center", size=8.5, color=ink)
                start += time
            ax.barh(rank, last - start, left=start, height=0.74, fc="white", ec=GREY, hatch="////", lw=0)
        idle = 1 - sum(ends[name]) / (last * len(ranks))
        ax.axvline(last, color=INK, lw=1.4)
        ax.axvline(bound, color=COLORS["orange"], ls=(0, (4, 2)), lw=1.8)
        over = max(last / bound - 1, 0)
        ax.set_title(f"{name}: slowest rank {over:.1%} over the least possible, ranks idle {idle:.0%} of the time")
        ax.set(ylim=(len(ranks) - 0.45, -0.55), yticks=range(len(ranks)), xlim=(0, right))
        ax.tick_params(axis="y", length=0)
        ax.grid(axis="y", visible=False)
    axes[-1].xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes[len(axes) // 2].set_ylabel("rank")
    axes[-1].set_xlabel(f"{axis} (dashed: the least possible for the slowest rank)")
    bar = fig.colorbar(ScalarMappable(norm, _SIZES), ax=axes, pad=0.015, aspect=34, shrink=0.9)
    bar.set_label("patches of the image")
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    set_titles(fig, title, subtitle)
    return fig, axes


def bytes_through_layers(layers: int, all_reduce_mb: float, gather_mb: float, title: str) -> tuple[Figure, Axes]:
    """Megabytes that collectives have handled by the end of each layer: two all-reduces a layer against one gather.

    Args:
        all_reduce_mb: of one all-reduced tensor.
        gather_mb: of the gathered tensor.
    """
    fig, ax = new_figure(9.5, 4.3)
    steps = np.arange(2 * layers + 1)
    sums = steps * all_reduce_mb
    ax.fill_between(steps / 2, sums, step="post", color=COLORS["sky"], alpha=0.55, lw=0)
    ax.step(steps / 2, sums, where="post", color=COLORS["blue"], label="tensor parallel: 2 all-reduces a block")
    ends = [0, layers, layers, 1.02 * layers]
    style = {"color": COLORS["orange"], "lw": 3, "solid_capstyle": "butt"}
    ax.plot(ends, [0, 0, gather_mb, gather_mb], label="data parallel: 1 gather at the end", **style)
    total = sums[-1]
    words = f"{2 * layers} x {all_reduce_mb:,.4g} = {total:,.4g} MB"
    ax.annotate(words, (layers, total), (8, -4), textcoords="offset points", va="center")
    words = f"1 x {gather_mb:,.4g} MB,\n{total / gather_mb:,.3g} times less"
    ax.annotate(words, (1.02 * layers, gather_mb), (7, 0), textcoords="offset points", va="bottom")
    ax.set(xlim=(0, 1.26 * layers), ylim=(-0.015 * total, 1.08 * total))
    ax.set(xlabel="blocks done", ylabel="MB summed or gathered so far")
    ax.set_xticks([tick for tick in range(0, layers + 1, 3 if layers > 12 else 1)])
    ax.legend(loc="upper left")
    set_titles(fig, title, COUNTED)
    return fig, ax


def recorded_modes(rows: Sequence[Row], *, title: str, subtitle: str) -> tuple[Figure, Axes]:
    """Recorded times of every batch over one rank's: data parallel, tensor parallel, and auto, which takes one of them.

    Args:
        rows: of one number of ranks, with the variants "single", "data", "tensor" and "auto" and `latency_ms_*`. The
            batches for which data parallel gains least come first; at the right stands the mode that auto chose, told
            by its collectives, and its time over the better mode's.
    """
    cases = by_case(rows, _MODES)
    ms = {name: {mode: row["latency_ms_p50"] for mode, row in case.items()} for name, case in cases.items()}
    cases = {name: cases[name] for name in sorted(cases, key=lambda name: ms[name]["tensor"] / ms[name]["data"])}
    single = np.array([ms[name]["single"] for name in cases])
    modes = [mode for mode in _MODES if mode != "single"]
    marks = [recorded_times(cases, mode, *_MODES[mode], over=single) for mode in modes]
    fig, ax = new_figure(10.5, 0.6 * len(cases) + 2.1)
    words = [f"{_chosen(case)}, {_over_best(ms[name]):.2f}x" for name, case in cases.items()]
    heading = "auto's choice, its time\n/ the faster way's"
    draw_lines(ax, [_batch_words(*item) for item in cases.items()], marks, notes=words, heading=heading, lanes=0.2)
    ranks = rows[0]["ranks_count"]
    ax.axvline(1, color=INK, lw=1.1, zorder=1)
    ax.axvline(1 / ranks, color=INK, lw=1.1, ls=(0, (4, 3)), zorder=1)
    ax.set_xlabel(f"time / time on one rank (upright line: 1; dashed: 1 / {ranks:.0f})")
    set_titles(fig, title, subtitle)
    return fig, ax


def _over_best(ms: Mapping[str, float]) -> float:
    return ms["auto"] / min(ms["data"], ms["tensor"])


def _chosen(case: Mapping[str, Row]) -> str:
    """The mode that auto chose: both have the same number of collectives."""
    count = case["auto"]["collective_count"]
    return next(mode for mode in ("data", "tensor") if case[mode]["collective_count"] == count)


def _batch_words(name: str, case: Mapping[str, Row]) -> str:
    """A batch with its patches and its time on one rank."""
    single = case["single"]
    return f"{case_words(name)}\n{single['patches']:,.0f} patches, {single['latency_ms_p50']:,.0f} ms on one rank"


def _draw_tensor(ax: Axes, x: float, width: float, height: float, cut: str, ranks: int) -> None:
    """A tensor centred on y = 0, coloured by rank: cut in "rows", "columns" or "heads", in "copies", or "shared"."""
    low = -height / 2
    if cut == "shared":
        ax.add_patch(Rectangle((x, low), width, height, fc="white", ec=GREY, lw=1.2))
    elif cut == "copies":
        for rank in reversed(range(ranks)):
            _draw_band(ax, x + _SHIFT * rank, low - _SHIFT * rank, width, height, rank, words=rank == 0)
    elif cut == "rows":
        for rank in range(ranks):
            _draw_band(ax, x, -low - (rank + 1) * height / ranks, width, height / ranks, rank)
    else:
        blocks = 3 if cut == "heads" else 1
        band = width / blocks / ranks
        for index in range(blocks * ranks):
            _draw_band(ax, x + index * band, low, band, height, index % ranks)
        for block in range(1, blocks):
            ax.plot([x + block * width / blocks] * 2, [low, -low], color="white", lw=3.5)


def _draw_band(ax: Axes, x: float, y: float, width: float, height: float, rank: int, words: bool = True) -> None:
    color, hatch = _RANKS[rank]
    ax.add_patch(Rectangle((x, y), width, height, fc=color, ec="white", hatch=hatch, lw=0.9))
    if words and min(width, height) > 0.35:
        box = {"boxstyle": "round,pad=0.1", "fc": color, "ec": "none"}
        ink = "white" if color == COLORS["navy"] else INK
        ax.text(x + width / 2, y + height / 2, str(rank), ha="center", va="center", size=8.5, color=ink, bbox=box)


def _draw_step(ax: Axes, x: float, length: float, words: str) -> None:
    """An arrow to the next tensor, named, and through a circle if it is a collective."""
    ends = (x + 0.2, 0), (x + length - 0.12, 0)
    ax.add_patch(FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=9, color=INK, lw=1.2, shrinkA=0, shrinkB=0))
    middle = x + length / 2
    if words in _SIGNS:
        ax.add_patch(Circle((middle, 0), 0.36, fc=COLORS["sand"], ec=INK, lw=1.2, zorder=4))
        ax.text(middle, -0.02, _SIGNS[words], ha="center", va="center", fontweight="bold", size=10, zorder=5)
    ax.text(middle, -0.55 if words in _SIGNS else -0.2, words, ha="center", va="top", size=8.5)
