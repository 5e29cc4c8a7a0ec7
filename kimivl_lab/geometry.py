"""Pixels -> resized and padded size -> grid -> patches -> tokens, in plain integers.

The one place that counts: the image processor, the metadata builder, buffers, budgets and placeholders all call it.
The rule is the published Kimi-VL image processor's: an image whose whole patches number more than `in_token_limit` is
shrunk by one common factor; then both sides are padded up to a multiple of `patch_size * merge`. Padding comes AFTER
the limit, so a padded grid may hold more patches than the limit: bounds downstream use `ImageGeometry.patches`.

Test: tests/test_geometry.py, tests/test_fuzz_numbers.py.
"""

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from .checks import as_positive, as_positive_pair

PATCH_SIZE = 14
MERGE_KERNEL_SIZE = (2, 2)
IN_TOKEN_LIMIT = 4096
MAX_GRID_SIDE = 512  # a side of this many patches or more is refused, as the published processor does


class Grid(NamedTuple):
    """The patches of one image, h rows of w: `Grid(4, 6)` has 24 patches and 6 tokens, and equals the tuple (4, 6)."""

    h: int
    w: int

    @property
    def patches(self) -> int:
        """Vectors that the image adds to the encoder's packed sequence."""
        return self.h * self.w

    def tokens(self, merge_kernel_size: Sequence[int] = MERGE_KERNEL_SIZE) -> int:
        """Merged tokens, (h // kh) * (w // kw). ValueError if the merge kernel does not divide the grid."""
        kh, kw = merge_kernel_size
        if self.h % kh or self.w % kw:
            raise ValueError(f"grid {self.h}x{self.w} (h x w, patches) is not divisible by the merge kernel {kh}x{kw}")
        return (self.h // kh) * (self.w // kw)


GridLike: TypeAlias = tuple[int, int]  # a `Grid`, or a plain (h, w): every function takes both


@dataclass(frozen=True)
class ImageGeometry:
    """Every size one image goes through, in pixels; `grid_h` and `grid_w` in patches.

    `content_width` and `content_height` are the pixels of the resized image that are kept; the rest of the padded
    size, to the right and below, is padding. With `pad_input=False` they are the centre crop and there is no padding.
    """

    width: int
    height: int
    resized_width: int
    resized_height: int
    content_width: int
    content_height: int
    padded_width: int
    padded_height: int
    grid_h: int
    grid_w: int
    merge_kernel_size: tuple[int, int] = MERGE_KERNEL_SIZE

    @property
    def grid_hw(self) -> Grid:
        return Grid(self.grid_h, self.grid_w)

    @property
    def patches(self) -> int:
        """Vectors that the image adds to the encoder's packed sequence."""
        return self.grid_hw.patches

    @property
    def tokens(self) -> int:
        """Vectors that the image adds to the language model's sequence, and placeholders in the prompt."""
        return self.grid_hw.tokens(self.merge_kernel_size)

    @property
    def padding_share(self) -> float:
        """Share of the padded pixels that is padding, 0 <= share < 1."""
        return 1 - self.content_width * self.content_height / (self.padded_width * self.padded_height)


def num_patches(grid_hw: GridLike) -> int:
    """Patches of one grid (h, w): h * w."""
    return Grid(*grid_hw).patches


def num_tokens(grid_hw: GridLike, merge_kernel_size: Sequence[int] = MERGE_KERNEL_SIZE) -> int:
    """Merged tokens of one grid (h, w), as `Grid.tokens`."""
    return Grid(*grid_hw).tokens(merge_kernel_size)


def as_grid_list(grid_hws: Any) -> list[Grid]:
    """`(n, 2)` grids as a list of `Grid`, in plain integers.

    Takes a list of pairs, a numpy array or a HOST tensor. Grids never leave the host (that is what makes a forward
    free of device reads), so a tensor on another device is a ValueError; so is anything not positive, not whole or not
    of shape (n, 2).
    """
    device = getattr(grid_hws, "device", None)
    if device is not None and getattr(device, "type", device) != "cpu":
        raise ValueError(f"grid_hws must stay on the host (cpu), got a tensor on {device}: keep the processor's tensor")
    if hasattr(grid_hws, "tolist"):
        grid_hws = grid_hws.tolist()
    try:
        grids = [Grid(operator.index(h), operator.index(w)) for h, w in grid_hws]
    except (TypeError, ValueError) as error:
        raise ValueError(f"grid_hws must be (n, 2) integers (h, w) in patches, got {grid_hws!r:.200}") from error
    for h, w in grids:
        if not (0 < h < MAX_GRID_SIDE and 0 < w < MAX_GRID_SIDE):
            raise ValueError(f"grid {h}x{w} (h x w, patches): each side must be 1 to {MAX_GRID_SIDE - 1}")
    return grids


def patch_counts(grid_hws: Iterable[GridLike]) -> list[int]:
    """Patches of each grid."""
    return [num_patches(grid) for grid in grid_hws]


def token_counts(grid_hws: Iterable[GridLike], merge_kernel_size: Sequence[int] = MERGE_KERNEL_SIZE) -> list[int]:
    """Merged tokens of each grid."""
    return [num_tokens(grid, merge_kernel_size) for grid in grid_hws]


def image_geometry(
    width: int,
    height: int,
    *,
    in_token_limit: int = IN_TOKEN_LIMIT,
    patch_size: int = PATCH_SIZE,
    merge_kernel_size: Sequence[int] = MERGE_KERNEL_SIZE,
    pad_input: bool = True,
) -> ImageGeometry:
    """The geometry of one image of `width` x `height` pixels.

    Args:
        in_token_limit: most whole patches the image may hold BEFORE padding; above it the image is shrunk. Never
            enlarges.
        pad_input: True pads right and below to multiples of `patch_size * merge`; False centre-crops to multiples of
            `patch_size` (the grid may then not be mergeable, and `tokens` says so).

    Raises:
        ValueError: a size or limit that is not a positive integer, a side of `MAX_GRID_SIDE` patches or more, or,
            without padding, a side smaller than one patch.

    Source: the published KimiVLImageProcessor (rescale, then pad or crop, then the 512 check).
    """
    width, height = as_positive("width", width), as_positive("height", height)
    in_token_limit = as_positive("in_token_limit", in_token_limit)
    patch_size = as_positive("patch_size", patch_size)
    kh, kw = as_positive_pair("merge_kernel_size", merge_kernel_size)

    resized_width, resized_height = width, height
    whole_patches = (width // patch_size) * (height // patch_size)
    if whole_patches > in_token_limit:
        scale = math.sqrt(in_token_limit / whole_patches)
        resized_width, resized_height = max(1, int(width * scale)), max(1, int(height * scale))

    if pad_input:
        content_width, content_height = resized_width, resized_height
        padded_width = _round_up(resized_width, patch_size * kw)
        padded_height = _round_up(resized_height, patch_size * kh)
    else:
        content_width = padded_width = resized_width // patch_size * patch_size
        content_height = padded_height = resized_height // patch_size * patch_size
        if not (padded_width and padded_height):
            raise ValueError(
                f"image {width}x{height} is {resized_width}x{resized_height} px after resizing: without padding each "
                f"side needs at least one patch of {patch_size} px"
            )
    grid_h, grid_w = padded_height // patch_size, padded_width // patch_size
    if grid_h >= MAX_GRID_SIDE or grid_w >= MAX_GRID_SIDE:
        raise ValueError(
            f"image {width}x{height} gives a grid of {grid_h}x{grid_w} patches (h x w): "
            f"each side must stay below {MAX_GRID_SIDE}"
        )
    return ImageGeometry(
        width=width,
        height=height,
        resized_width=resized_width,
        resized_height=resized_height,
        content_width=content_width,
        content_height=content_height,
        padded_width=padded_width,
        padded_height=padded_height,
        grid_h=grid_h,
        grid_w=grid_w,
        merge_kernel_size=(kh, kw),
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
