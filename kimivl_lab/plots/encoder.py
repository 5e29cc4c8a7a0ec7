"""The encoder drawn: its tensors to scale, where its FLOPs are, and where its time goes.

Test: tests/test_plots.py.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.ticker import FixedLocator, PercentFormatter

from ..config import KimiVLConfig
from ..measure.timing import Timing
from .lines import Marks, draw_lines, log_axis, mark
from .patches import Picture, draw_patches
from .style import COLORS, COUNTED, GREY, INK, name_lines, new_figure, set_titles

_BANDS = (COLORS["navy"], COLORS["orange"], COLORS["sky"], COLORS["blue"])


def encoder_diagram(pictures: Mapping[str, Picture], config: KimiVLConfig) -> tuple[Figure, Axes]:
    """Pictures -> patches -> blocks -> merge -> projector: every tensor drawn to scale, rows down, features across.

    Args:
        pictures: name -> (image, its geometry), up to four, in packed order; each has its colour in every tensor.
    """
    vision, text = config.vision_config, config.text_config
    patches = [geometry.patches for _, geometry in pictures.values()]
    rows, merge, dim = sum(patches), vision.merge_size, vision.hidden_size
    tokens = rows // merge
    tensors = [
        ("patches", "(L, 3, 14, 14)", rows, vision.patch_dim),
        ("embedded", "(L, D)", rows, dim),
        ("encoded", "(L, D)", rows, dim),
        ("merged", f"(T, {merge}, D)", tokens, merge * dim),
        ("projected", "(T, H)", tokens, text.hidden_size),
    ]
    blocks = f"{vision.num_hidden_layers} blocks"
    steps = ["processor", "patch embed\n+ position", blocks, "merge 2 x 2", "projector"]

    fig, ax = new_figure(10, 4.35)
    ax.set(xlim=(0, 100), ylim=(0.5, 36), aspect="equal")
    ax.set_axis_off()
    _draw_thumbnails(ax, pictures, top=33.0, bottom=6.0)
    gap, top, tall, x = 11.0, 33.0, 27.0, 14.0
    wide = (100 - x - gap * len(steps) - 1) / sum(features for *_, features in tensors)
    for step, (name, shape, count, features) in zip(steps, tensors, strict=True):
        width, height = features * wide, tall * count / rows
        _draw_arrow(ax, x, top - tall / merge / 2, gap, step)
        if step == blocks:
            _draw_attention(ax, x + gap / 2, 16.0, patches)
        x += gap
        _draw_tensor(ax, x, top, width, height, patches)
        ax.text(x + width / 2, top + 0.9, name, ha="center", va="bottom", fontweight="bold")
        words = f"{shape}\n{count:,} x {features:,}"
        ax.text(x + width / 2, top - height - 0.9, words, ha="center", va="top", fontsize=10, color=GREY)
        x += width
    words = f"L = sum of h x w, all images packed\nT = L / {merge}\nD = {dim:,}, H = {text.hidden_size:,}"
    ax.text(66.5, 6.0, words, va="bottom", linespacing=1.5, color=GREY)
    title = f"{len(patches)} images, one packed sequence: {rows:,} patches in, {tokens:,} tokens out"
    set_titles(fig, title, f"tensors to scale: patches down, features across; a colour is an image  ·  {COUNTED}")
    return fig, ax


def flops_by_size(
    patches: Sequence[int], shares: Mapping[str, Sequence[float]], marks: Mapping[str, float], title: str
) -> tuple[Figure, Axes]:
    """Share of the FLOPs of each part, against the size of one image.

    Args:
        patches: of one image, ascending.
        shares: part -> its share (0..1) at each size; drawn from the bottom up, at most five parts.
        marks: words -> a number of patches, drawn as an upright line.
    """
    fig, ax = new_figure(9, 4.6)
    colors = [COLORS[name] for name in ("navy", "blue", "sand", "sky", "orange")][-len(shares) :]
    base = np.zeros(len(patches))
    inside = slice(len(patches) // 4, len(patches) * 7 // 10)
    for color, (name, share) in zip(colors, shares.items(), strict=True):
        values = np.asarray(share)
        ax.fill_between(patches, base, base + values, color=color, ec="white", lw=1.2)
        thickest = inside.start + int(values[inside].argmax())
        at, y = (patches[thickest], (base + values / 2)[thickest])
        if values[thickest] > 0.06:
            dark = color in (COLORS["navy"], COLORS["blue"])
            ax.text(at, y, name, ha="center", va="center", color="white" if dark else INK)
        else:
            early = len(patches) // 12  # left of the names that stand inside their parts
            point, arrow = (patches[early], base[early] + values[early] / 2), {"arrowstyle": "-", "color": INK, "lw": 1}
            ax.annotate(name, point, (-8, -26), textcoords="offset points", arrowprops=arrow)
        base = base + values
    for index, (words, at) in enumerate(marks.items()):
        ax.axvline(at, color=INK, ls=(0, (4, 3)), lw=1.4)
        lift = (0, 4 + 14 * (index % 2))
        ax.annotate(words, (at, 1), lift, textcoords="offset points", ha="right", va="bottom", fontsize=10)
    ax.set_xscale("log", base=2)
    ax.set(
        xlim=(patches[0], 1.2 * patches[-1]), ylim=(0, 1), xlabel="patches of one image", ylabel="share of the FLOPs"
    )
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    set_titles(fig, title, COUNTED)
    return fig, ax


def stage_profile(
    flops_share: Mapping[str, float],
    time_ms: Mapping[str, Timing],
    bound_ms: Mapping[str, float],
    *,
    title: str,
    subtitle: str,
) -> tuple[Figure, Sequence[Axes]]:
    """Stage by stage: predicted share of the FLOPs beside the measured share of the time; time over the roofline.

    Args:
        flops_share: stage -> share (0..1), in the order of the forward; the other two have the same keys.
        time_ms: measured, all layers together.
        bound_ms: the roofline: FLOPs at the speed of this machine's own large matrix product, or bytes at that of its
            copy, whichever takes longer.
    """
    fig, (left, right) = new_figure(10, 0.46 * len(flops_share) + 1.9, ncols=2, sharey=True, width_ratios=(1.75, 1))
    names = list(flops_share)
    y = np.arange(len(names))[::-1]
    total = sum(timing.p50_ms for timing in time_ms.values())
    share = np.array([time_ms[name].p50_ms for name in names]) / total
    spread = np.array([[t.p50_ms - t.p20_ms, t.p80_ms - t.p50_ms] for t in map(time_ms.__getitem__, names)]).T / total
    style = {"height": 0.36, "edgecolor": COLORS["blue"], "linewidth": 0.8}
    predicted = [flops_share[name] for name in names]
    left.barh(y + 0.19, predicted, color=COLORS["sand"], hatch="////", label="FLOPs, predicted", **style)
    bars = {"error_kw": {"ecolor": INK, "elinewidth": 1.3, "capsize": 2.5}}
    left.barh(
        y - 0.19, share, xerr=spread, color=COLORS["blue"], label="time, measured (bar: p20 to p80)", **style, **bars
    )
    for at, value, high in zip(y, share, spread[1], strict=True):
        left.annotate(
            f"{value:.0%}", (value + high, at - 0.19), (4, 0), textcoords="offset points", va="center", size=10
        )
    left.set(yticks=y, yticklabels=names, xlabel="share of the whole", xlim=(0, None))
    left.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    left.set_ylim(-0.6, len(names) - 0.4)
    name_lines(left)
    left.legend(loc="lower right")

    slower = np.array([time_ms[name].p50_ms / bound_ms[name] for name in names])
    over = Marks("", slower, mark("navy", "o", 7))
    draw_lines(right, names, [over], notes=[f"{value:.1f}x" for value in slower], stem=1)
    right.axvline(1, color=INK, lw=1.2)
    log_axis(right, "time over the roofline (1 = on it)")
    right.xaxis.set_major_locator(FixedLocator([0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500]))
    set_titles(fig, title, subtitle)
    return fig, (left, right)


def _draw_thumbnails(ax: Axes, pictures: Mapping[str, Picture], top: float, bottom: float) -> None:
    """The images one above another at the left, each framed in its colour."""
    room, words = (top - bottom) / len(pictures), 2.6
    for color, (name, (image, geometry)) in zip(_BANDS, pictures.items(), strict=False):
        aspect = geometry.padded_width / geometry.padded_height
        width = min(13.0, (room - words) * aspect)
        inner = ax.inset_axes((0.3, top - width / aspect, width, width / aspect), transform=ax.transData)
        draw_patches(inner, (image, geometry), line_width=0.12)
        inner.set(xticks=[], yticks=[])
        for spine in inner.spines.values():
            spine.set(visible=True, edgecolor=color, linewidth=3)
        ax.text(0, top - width / aspect - 0.6, f"{name} {geometry.grid_h} x {geometry.grid_w}", va="top", fontsize=10)
        top -= room


def _draw_tensor(ax: Axes, x: float, top: float, width: float, height: float, patches: Sequence[int]) -> None:
    for color, count in zip(_BANDS, patches, strict=False):
        part = height * count / sum(patches)
        ax.add_patch(Rectangle((x, top - part), width, part, facecolor=color, edgecolor="white", linewidth=0.8))
        top -= part


def _draw_attention(ax: Axes, center: float, top: float, patches: Sequence[int]) -> None:
    """The L x L matrix of scores, of which only the images' own squares are computed."""
    side, x, y = 9.0, center - 4.5, top
    ax.add_patch(Rectangle((x, y - side), side, side, facecolor="white", edgecolor=GREY, linewidth=0.9))
    for color, count in zip(_BANDS, patches, strict=False):
        part = side * count / sum(patches)
        ax.add_patch(Rectangle((x, y - part), part, part, facecolor=color, edgecolor="none"))
        x, y = x + part, y - part
    ax.text(center, top + 0.6, "attention", ha="center", va="bottom", fontsize=10)
    ax.text(center, top - side - 0.7, "L x L", ha="center", va="top", fontsize=10, color=GREY)


def _draw_arrow(ax: Axes, x: float, y: float, length: float, words: str) -> None:
    ends = (x + 0.8, y), (x + length - 0.8, y)
    ax.add_patch(FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=14, color=INK, lw=1.6, shrinkA=0, shrinkB=0))
    for line, lift, side in zip(words.split("\n"), (0.8, -0.8), ("bottom", "top"), strict=False):
        ax.text(x + length / 2, y + lift, line, ha="center", va=side, fontsize=10)
