"""The plain image processor that `KimiVLImageProcessor` must equal bit for bit: the published one, step by step.

Each image is made a float32 array, normalised and cut, and then all are concatenated. That reads and writes the data
about a dozen times at 4 bytes a number; the fast path does it once.

Test: tests/test_image_processor.py. Record: preprocess__*.csv.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from ..geometry import IN_TOKEN_LIMIT, MERGE_KERNEL_SIZE, PATCH_SIZE, ImageGeometry, image_geometry


def reference_preprocess(
    images: Iterable[Image.Image],
    *,
    in_token_limit: int = IN_TOKEN_LIMIT,
    patch_size: int = PATCH_SIZE,
    merge_kernel_size: Sequence[int] = MERGE_KERNEL_SIZE,
    pad_input: bool = True,
    image_mean: Sequence[float] = (0.5, 0.5, 0.5),
    image_std: Sequence[float] = (0.5, 0.5, 0.5),
) -> tuple[Tensor, Tensor]:
    """(L, 3, p, p) float32 pixel values and (n, 2) int64 grids of upright images in mode L, LA, RGB or RGBA.

    ValueError as in `image_geometry`. Needs at least one image.
    """
    pixel_values, grids = [], []
    for image in images:
        geometry = image_geometry(
            *image.size,
            in_token_limit=in_token_limit,
            patch_size=patch_size,
            merge_kernel_size=merge_kernel_size,
            pad_input=pad_input,
        )
        pixels = normalise(to_tensor(pad_or_crop(resize(image, geometry), geometry)), image_mean, image_std)
        pixel_values.append(patchify(pixels, patch_size))
        grids.append(geometry.grid_hw)
    return torch.cat(pixel_values), torch.tensor(grids, dtype=torch.int64, device="cpu")


def resize(image: Image.Image, geometry: ImageGeometry) -> Image.Image:
    """PIL bicubic in the image's mode, where the geometry gives another size."""
    size = (geometry.resized_width, geometry.resized_height)
    return image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)


def pad_or_crop(image: Image.Image, geometry: ImageGeometry) -> Image.Image:
    """Zeros to the right and below up to the padded size, or the centre of that size."""
    right, below = geometry.padded_width - image.width, geometry.padded_height - image.height
    if right >= 0 and below >= 0:
        return ImageOps.expand(image, (0, 0, right, below), fill=0)
    left, top = round(-right / 2), round(-below / 2)
    return image.crop((left, top, left + geometry.padded_width, top + geometry.padded_height))


def to_tensor(image: Image.Image) -> Tensor:
    """RGB, then (3, H, W) float32 in 0..1."""
    levels = torch.from_numpy(np.array(image.convert("RGB")))  # (H, W, 3) uint8
    return levels.permute(2, 0, 1).contiguous().float() / 255


def normalise(pixels: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(pixels - mean) / std for each channel of (3, H, W)."""
    means, stds = (torch.tensor(values, device="cpu").view(3, 1, 1) for values in (mean, std))
    return (pixels - means) / stds


def patchify(pixels: Tensor, patch_size: int) -> Tensor:
    """(C, H, W) -> (H/p * W/p, C, p, p), row-major over the grid."""
    channels, height, width = pixels.shape
    grid = pixels.view(channels, height // patch_size, patch_size, width // patch_size, patch_size)
    return grid.permute(1, 3, 0, 2, 4).contiguous().view(-1, channels, patch_size, patch_size)
