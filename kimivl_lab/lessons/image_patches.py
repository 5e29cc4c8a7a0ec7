"""An image cut into patches in plain Python, and the most patches that an image can have, for notebook 10.

    patches = plain_patches(image)            # the processor's result, one step a line: (h * w, 3, 14, 14)
    grid = largest_grid(4096)                 # the largest grid that the proof in notebook 10 leaves open

Use it as the reference that a learner's code and the processor are compared with.
Example: at a limit of 4,096 patches a 66 x 66 grid is possible (1,000 x 1,000 pixels have it), 68 x 68 is not.
Test: tests/test_image_patches.py.
"""

import math

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..geometry import IN_TOKEN_LIMIT, MAX_GRID_SIDE, PATCH_SIZE, Grid, ImageGeometry

WINDOW = 2 * PATCH_SIZE  # pixels of one token's side


def cut(pixels: Tensor) -> Tensor:
    """(3, height, width), sides multiples of 14 -> (h * w, 3, 14, 14), line by line."""
    _, height, width = pixels.shape
    tops, lefts = range(0, height, PATCH_SIZE), range(0, width, PATCH_SIZE)
    squares = [pixels[:, y : y + PATCH_SIZE, x : x + PATCH_SIZE] for y in tops for x in lefts]
    return torch.stack(squares)


def plain_patches(image: Image.Image, limit: int = IN_TOKEN_LIMIT) -> Tensor:
    """One image -> its normalised patches (h * w, 3, 14, 14), float32: the rule of the processor, one step a line."""
    width, height = image.size
    whole = (width // PATCH_SIZE) * (height // PATCH_SIZE)
    if whole > limit:
        scale = math.sqrt(limit / whole)
        width, height = max(1, int(width * scale)), max(1, int(height * scale))
    resized = image.resize((width, height), Image.Resampling.BICUBIC).convert("RGB")
    canvas = Image.new("RGB", (math.ceil(width / WINDOW) * WINDOW, math.ceil(height / WINDOW) * WINDOW))  # black
    canvas.paste(resized, (0, 0))
    pixels = torch.from_numpy(np.array(canvas)).permute(2, 0, 1) / 255  # (3, height, width)
    return cut((pixels - 0.5) / 0.5)


def blank_patches(geometry: ImageGeometry) -> int:
    """Patches of an image that show nothing but padding."""
    columns = math.ceil(geometry.content_width / PATCH_SIZE)
    rows = math.ceil(geometry.content_height / PATCH_SIZE)
    return geometry.patches - rows * columns


def may_be_reached(grid: tuple[int, int], limit: int = IN_TOKEN_LIMIT) -> bool:
    """False if the proof excludes that any image ends on this grid (even sides); True says only that it does not."""
    rows, columns = (side - 2 for side in grid)  # whole patches that the image has at least
    if rows * columns <= limit:
        return True
    least = (PATCH_SIZE * rows + 1) * (PATCH_SIZE * columns + 1)
    most = PATCH_SIZE**2 * limit * (1 + 1 / rows) * (1 + 1 / columns)
    return least < most


def largest_grid(limit: int = IN_TOKEN_LIMIT) -> Grid:
    """The grid with the most patches that `may_be_reached`."""
    sides = range(2, MAX_GRID_SIDE, 2)
    reached = (Grid(h, w) for h in sides for w in sides if may_be_reached((h, w), limit))
    return max(reached, key=lambda grid: grid.patches)


def embed(patches: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """(n, 3, 14, 14) patches -> (n, D) features: the linear map of the patch embedding."""
    return patches.flatten(1) @ weight.flatten(1).T + bias
