"""The image processor written out patch by patch from its published description, sharing no code with the library."""

import math
from pathlib import Path

import numpy as np
import torch
from PIL import Image

IMAGES = Path(__file__).resolve().parents[1] / "data" / "images"


def oracle_size(width: int, height: int, limit: int) -> tuple[int, int]:
    whole = (width // 14) * (height // 14)
    if whole <= limit:
        return width, height
    scale = math.sqrt(limit / whole)
    return max(1, int(width * scale)), max(1, int(height * scale))


def oracle_levels(image: Image.Image, limit: int = 4096, pad: bool = True) -> np.ndarray:
    """(H, W, 3) uint8 after resize, RGB, and padding or centre crop."""
    size = oracle_size(image.width, image.height, limit)
    levels = np.array((image if size == image.size else image.resize(size, Image.Resampling.BICUBIC)).convert("RGB"))
    height, width, _ = levels.shape
    if pad:
        canvas = np.zeros((math.ceil(height / 28) * 28, math.ceil(width / 28) * 28, 3), dtype=np.uint8)
        canvas[:height, :width] = levels
        return canvas
    top, left = round(height % 14 / 2), round(width % 14 / 2)
    return levels[top : top + height // 14 * 14, left : left + width // 14 * 14]


def oracle(images, limit=4096, pad=True, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)) -> tuple[torch.Tensor, list]:
    """(L, 3, 14, 14) float32 and the grids (h, w) of PIL images."""
    patches, grids = [], []
    for image in images:
        levels = oracle_levels(image, limit, pad)
        grids.append((levels.shape[0] // 14, levels.shape[1] // 14))
        unit = levels.astype(np.float32) / np.float32(255)
        pixels = (unit - np.array(mean, dtype=np.float32)) / np.array(std, dtype=np.float32)
        for y in range(0, levels.shape[0], 14):
            for x in range(0, levels.shape[1], 14):
                patches.append([pixels[y : y + 14, x : x + 14, channel] for channel in range(3)])
    return torch.from_numpy(np.array(patches)), [list(grid) for grid in grids]


def noise(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Random levels in every channel, alpha included."""
    channels = {"L": (), "LA": (2,), "RGB": (3,), "RGBA": (4,)}[mode]
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, *channels), dtype=np.uint8))


def see_through(width: int, height: int, seed: int = 0) -> Image.Image:
    """RGBA whose pixels are either opaque or wholly transparent, a few flat colours: every mode can hold it."""
    image = noise(width, height, "RGBA", seed)
    levels = np.array(image)
    levels[..., :3] = np.array([[250, 20, 30], [20, 240, 50], [90, 90, 200]], dtype=np.uint8)[levels[..., 0] % 3]
    clear = levels[..., 3] < 100
    levels[clear] = (7, 77, 177, 0)
    levels[~clear, 3] = 255
    return Image.fromarray(levels)


def assert_same(batch, pixel_values: torch.Tensor, grids: list) -> None:
    """Bit for bit."""
    assert batch.image_grid_hws.tolist() == grids
    assert batch.pixel_values.dtype == pixel_values.dtype
    assert torch.equal(batch.pixel_values, pixel_values)
