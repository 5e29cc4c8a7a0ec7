"""Sizes to which clients can round their images so that few distinct sequence lengths remain.

SGLang's runner of encoder graphs has no budgets: it keeps one graph for each exact number of patches, so its memory and
its captures grow with the number of distinct sizes. A client that shrinks each side to a multiple of N pixels makes
that number small, and loses some pixels.

Test: tests/test_rounding.py.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ..checks import as_positive
from ..geometry import IN_TOKEN_LIMIT, image_geometry
from .workload import Size

TOKEN_PIXELS = 28  # side of a merged token: 2 patches of 14 pixels


@dataclass(frozen=True)
class Rounding:
    """Attributes:
    to: pixels; sides are multiples of it.
    lengths: distinct numbers of patches before and after.
    sizes: (width, height) after -> how many images, most frequent first.
    pixels_lost: share of the pixels that the processor would have kept.
    """

    to: int
    lengths: tuple[int, int]
    sizes: dict[tuple[int, int], int]
    pixels_lost: float


def round_sizes(sizes: Iterable[Size], to: int, in_token_limit: int = IN_TOKEN_LIMIT) -> Rounding:
    """Rounds every image down, after the processor's own shrinking; a side below `to` stays as it is.

    Example: with `to=224`, 640 x 480 becomes 448 x 448, and 35 % of its pixels are lost.

    Args:
        to: pixels, a multiple of 28.

    Raises:
        ValueError: another `to`; no sizes; a size that the processor refuses.
    """
    if as_positive("to", to) % TOKEN_PIXELS:
        raise ValueError(f"to must be a multiple of {TOKEN_PIXELS} pixels, the side of a merged token, got {to}")
    before, after, rounded = set[int](), set[int](), Counter[tuple[int, int]]()
    kept = lost = 0
    for width, height, *rest in sizes:
        count = rest[0] if rest else 1
        geometry = image_geometry(width, height, in_token_limit=in_token_limit)
        shrunk = geometry.resized_width, geometry.resized_height
        w, h = (side // to * to or side for side in shrunk)
        before.add(geometry.patches)
        after.add(image_geometry(w, h, in_token_limit=in_token_limit).patches)
        rounded[w, h] += count
        kept += w * h * count
        lost += (shrunk[0] * shrunk[1] - w * h) * count
    if not rounded:
        raise ValueError("no image sizes to round")
    return Rounding(to, (len(before), len(after)), dict(rounded.most_common()), lost / (kept + lost))
