"""The plain cut against torch's unfold, the plain rule against the processor, and the bound against many sizes."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from kimivl_lab import KimiVLImageProcessor, image_geometry
from kimivl_lab.lessons.image_patches import blank_patches, cut, largest_grid, may_be_reached, plain_patches


def test_cut_is_unfold_line_by_line():
    pixels = torch.rand(3, 28, 56, generator=torch.Generator().manual_seed(0))
    unfolded = F.unfold(pixels[None], 14, stride=14)[0].T.reshape(8, 3, 14, 14)
    assert torch.equal(cut(pixels), unfolded)


@pytest.mark.parametrize("size", [(640, 427), (1100, 900), (1, 30)])
def test_the_plain_rule_is_the_processors(size):
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    assert torch.equal(plain_patches(image), KimiVLImageProcessor()(image).pixel_values)


def test_blank_patches_by_hand():
    assert blank_patches(image_geometry(600, 400)) == 44 * 30 - 43 * 29
    assert blank_patches(image_geometry(28, 28)) == 0 and blank_patches(image_geometry(1, 1)) == 3


def test_no_size_passes_the_bound_and_some_come_near():
    assert may_be_reached((66, 66)) and not may_be_reached((68, 68))
    for limit in (64, 4096):
        most = largest_grid(limit).patches
        grids = {
            image_geometry(w, h, in_token_limit=limit).grid_hw for w in range(1, 400, 7) for h in range(1, 7000, 83)
        }
        assert all(may_be_reached(grid, limit) for grid in grids)
        assert max(grid.patches for grid in grids) <= most
    assert largest_grid().patches == 5400 and image_geometry(153, 6731).patches == 5352
