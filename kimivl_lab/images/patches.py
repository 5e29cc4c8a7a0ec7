"""Resized 8-bit images -> packed patches: pad or crop, patchify, normalise.

The image stays in uint8 until its patches lie in place, then one pass turns them into float32 with exactly the
reference's arithmetic, ((x / 255) - mean) / std in float32 (checked for all 256 levels).

Test: tests/test_image_processor.py.
"""

from collections.abc import Sequence

import numpy as np

from ..geometry import ImageGeometry

_BLOCK = 1 << 18  # numbers normalised at a time, so that the second operation finds them in the cache
_LEVELS = np.arange(256, dtype=np.float32)

Steps = tuple[tuple[np.ufunc, np.float32], ...]


def normalised_levels(mean: float, std: float) -> np.ndarray:
    """What each of the 256 levels becomes, (256,) float32: the reference's three operations, each rounded."""
    return (_LEVELS / np.float32(255) - np.float32(mean)) / np.float32(std)


def normalising_steps(mean: float, std: float) -> Steps:
    """Operations that turn levels into `normalised_levels`, bit for bit.

    x / (255 std) - mean / std, where that rounds alike for every level (it does when std is a power of two, as the
    published 0.5 is), else the three operations one by one.
    """
    scale, shift = np.float32(255) * np.float32(std), np.float32(mean) / np.float32(std)
    if np.array_equal(_LEVELS / scale - shift, normalised_levels(mean, std)):
        return ((np.divide, scale), (np.subtract, shift))
    return ((np.divide, np.float32(255)), (np.subtract, np.float32(mean)), (np.divide, np.float32(std)))


def write_patches(content: np.ndarray, geometry: ImageGeometry, patch_size: int, out: np.ndarray) -> None:
    """Writes one image's patches, row-major over the grid, un-normalised; padding is 0.

    Args:
        content: (resized_height, resized_width, 3) uint8. With padding all of it is kept; without, its centre.
        out: (h * w, 3, patch_size, patch_size) uint8, contiguous, filled.
    """
    height, width = geometry.padded_height, geometry.padded_width
    kept_height, kept_width = geometry.content_height, geometry.content_width
    top = round((content.shape[0] - kept_height) / 2)  # half to even, as the reference's crop does
    left = round((content.shape[1] - kept_width) / 2)
    pixels = content[top : top + kept_height, left : left + kept_width]
    if (kept_height, kept_width) != (height, width):
        padded = np.zeros((height, width, 3), dtype=np.uint8)
        padded[:kept_height, :kept_width] = pixels
        pixels = padded
    p = patch_size
    patches = pixels.reshape(geometry.grid_h, p, geometry.grid_w, p, 3).transpose(0, 2, 4, 1, 3)  # (h, w, 3, p, p)
    np.copyto(out.reshape(patches.shape), patches)


def write_normalised(levels: np.ndarray, steps: Sequence[Steps], out: np.ndarray) -> None:
    """Normalises packed patches.

    Args:
        levels: (L, 3, p, p) uint8, contiguous.
        steps: `normalising_steps` of each of the three channels.
        out: (L, 3, p, p) float32, contiguous, filled.
    """
    if steps[0] == steps[1] == steps[2]:
        flat_levels, flat_out = levels.reshape(-1), out.reshape(-1)
        for start in range(0, flat_levels.size, _BLOCK):
            block = slice(start, start + _BLOCK)
            _apply(steps[0], flat_levels[block], flat_out[block])
    else:
        for channel, channel_steps in enumerate(steps):
            _apply(channel_steps, levels[:, channel], out[:, channel])


def _apply(steps: Steps, levels: np.ndarray, out: np.ndarray) -> None:
    (first, operand), *rest = steps
    first(levels, operand, out=out, dtype=np.float32)
    for operation, operand in rest:
        operation(out, operand, out=out)
