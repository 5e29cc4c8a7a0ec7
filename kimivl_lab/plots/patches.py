"""Photographs with the patch grid, the merge windows and the padding drawn over them.

Test: tests/test_plots.py.
"""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import ConnectionPatch, PathPatch, Rectangle
from matplotlib.path import Path as Outline
from PIL import Image

from ..geometry import PATCH_SIZE, ImageGeometry
from .style import COLORS, COUNTED, GREY, LIGHT, leave_header, set_titles

Picture = tuple[Image.Image, ImageGeometry]

_WIDTH = 10.0
_ZOOMED = 3  # merge windows along each side of the enlarged corner, fewer where the image has fewer
_LEAST_ASPECT = 0.72  # room for the words over a narrow image


def patch_grid(picture: Picture) -> tuple[Figure, list[Axes]]:
    """The whole image with its grid, and its bottom right corner enlarged, patches numbered.

    Args:
        picture: the image as opened, and its geometry.
    """
    geometry = picture[1]
    fig, (whole, corner) = plt.subplots(1, 2, figsize=(_WIDTH, 4.7), layout="constrained", width_ratios=(1.42, 1))
    leave_header(fig)
    draw_patches(whole, picture)
    draw_patches(corner, picture, line_width=1.3)
    _zoom(fig, whole, corner, geometry, min(_ZOOMED, geometry.grid_h // 2, geometry.grid_w // 2))
    whole.set(title=f"{geometry.grid_h} x {geometry.grid_w} patches (h x w)", xlabel="pixels", ylabel="pixels")
    corner.set(title="bottom right corner: patch numbers", xlabel="pixels", ylabel="pixels")
    whole.set_anchor("N")
    corner.set_anchor("N")
    title = f"{geometry.width} x {geometry.height} px become {geometry.patches:,} patches, {geometry.tokens:,} tokens"
    set_titles(fig, title, COUNTED)
    return fig, [whole, corner]


def patch_gallery(rows: Sequence[dict[str, Picture]]) -> tuple[Figure, dict[str, Axes]]:
    """Rows of images of very different shapes, each with its grid and its counts; not to one scale."""
    shapes = [[max(_aspect(geometry), _LEAST_ASPECT) for _, geometry in row.values()] for row in rows]
    captions = [{name: _caption(name, geometry) for name, (_, geometry) in row.items()} for row in rows]
    lines = [max(caption.count("\n") + 1 for caption in row.values()) for row in captions]
    heights = [_WIDTH / sum(shape) + 0.2 * count for shape, count in zip(shapes, lines, strict=True)]
    fig = plt.figure(figsize=(_WIDTH, sum(heights) + 0.8), layout="constrained")
    leave_header(fig)
    outer = fig.add_gridspec(len(rows), 1, height_ratios=heights)
    axes: dict[str, Axes] = {}
    for index, (row, shape) in enumerate(zip(rows, shapes, strict=True)):
        cells = outer[index].subgridspec(1, len(row), width_ratios=shape)
        for column, (name, picture) in enumerate(row.items()):
            ax = axes[name] = fig.add_subplot(cells[column])
            draw_patches(ax, picture)
            ax.set(title=captions[index][name], anchor="NW")
            ax.set_axis_off()
    set_titles(fig, "Native resolution: every image keeps its own grid", COUNTED)
    return fig, axes


def draw_patches(ax: Axes, picture: Picture, *, line_width: float | None = None) -> None:
    """The image as the encoder receives it: resized, padded right and below; thin lines part patches, thick lines
    the 2 x 2 windows that become one token; padding is hatched.

    Args:
        line_width: of the thin lines, in points; by the fineness of the grid when None.
    """
    image, geometry = picture
    line_width = line_width or min(1.3, max(0.3, 14 / max(geometry.grid_hw)))
    width, height = geometry.padded_width, geometry.padded_height
    resized = image.convert("RGB").resize((geometry.resized_width, geometry.resized_height), Image.Resampling.BICUBIC)
    canvas = Image.new("RGB", (width, height))
    canvas.paste(resized)
    ax.imshow(np.asarray(canvas), extent=(0, width, height, 0), interpolation="antialiased")
    ax.add_patch(_padding(geometry))
    for step, line, color in ((PATCH_SIZE, line_width, "white"), (2 * PATCH_SIZE, 2.3 * line_width, COLORS["sand"])):
        vertical = [[(x, 0), (x, height)] for x in range(0, width + 1, step)]
        horizontal = [[(0, y), (width, y)] for y in range(0, height + 1, step)]
        ax.add_collection(LineCollection([*vertical, *horizontal], colors=color, linewidths=line))
    ax.grid(False)
    ax.set(xlim=(0, width), ylim=(height, 0), aspect="equal")
    ax.tick_params(colors=GREY)


def _zoom(fig: Figure, whole: Axes, corner: Axes, geometry: ImageGeometry, windows: int) -> None:
    """Shows the last `windows` x `windows` merge windows of `whole` in `corner`, with patch numbers."""
    right, bottom, side = geometry.padded_width, geometry.padded_height, 2 * windows * PATCH_SIZE
    corner.set(xlim=(right - side, right), ylim=(bottom, bottom - side))
    corner.yaxis.tick_right()
    corner.yaxis.set_label_position("right")
    for row in range(geometry.grid_h - 2 * windows, geometry.grid_h):
        for column in range(geometry.grid_w - 2 * windows, geometry.grid_w):
            number, center = row * geometry.grid_w + column, ((column + 0.5) * PATCH_SIZE, (row + 0.5) * PATCH_SIZE)
            corner.text(*center, f"{number}", ha="center", va="center", fontsize=9, bbox=_LABEL)
    frame = Rectangle((right - side, bottom - side), side, side, fill=False, ec=COLORS["orange"], lw=2.5, zorder=6)
    whole.add_patch(frame)
    for below in (0, 1):
        line = ConnectionPatch(
            (right, bottom - side * (1 - below)), (0, 1 - below), "data", "axes fraction", axesA=whole, axesB=corner
        )
        line.set(color=COLORS["orange"], linewidth=1.6)
        fig.add_artist(line)


def _padding(geometry: ImageGeometry) -> PathPatch:
    """The padded region, right and below, as one hatched outline."""
    width, height = geometry.padded_width, geometry.padded_height
    inner_w, inner_h = geometry.content_width, geometry.content_height
    corners = [(inner_w, 0), (width, 0), (width, height), (0, height), (0, inner_h), (inner_w, inner_h), (inner_w, 0)]
    return PathPatch(Outline(corners), facecolor=LIGHT, edgecolor=COLORS["blue"], hatch="/////", linewidth=0)


def _caption(name: str, geometry: ImageGeometry) -> str:
    size = f"{name}, {geometry.width} x {geometry.height} px"
    grid = f"{geometry.grid_h} x {geometry.grid_w} patches"
    tokens = f"{geometry.tokens:,} token" + "s" * (geometry.tokens > 1)
    padding = f"{100 * geometry.padding_share:.0f} % padding"
    return f"{size}: {grid}, {tokens}, {padding}" if _aspect(geometry) > 3 else "\n".join((size, grid, tokens, padding))


def _aspect(geometry: ImageGeometry) -> float:
    return geometry.padded_width / geometry.padded_height


_LABEL = {"boxstyle": "round,pad=0.18", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
