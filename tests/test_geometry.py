"""Sizes: the published table, the largest reachable grids, and what is refused."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimivl_lab.geometry import Grid, as_grid_list, image_geometry, num_tokens, patch_counts, token_counts
from tests.image_oracle import oracle_size

# width, height, grid (h, w) at limit 4096, at 16384
TABLE = [
    (10, 10, (2, 2), (2, 2)),
    (640, 480, (36, 46), (36, 46)),
    (896, 896, (64, 64), (64, 64)),
    (1000, 1000, (66, 66), (72, 72)),
    (1024, 1024, (66, 66), (74, 74)),
    (1792, 1792, (64, 64), (128, 128)),
    (1920, 1080, (48, 86), (78, 138)),
    (3840, 2160, (48, 86), (98, 172)),
    (27, 332, (24, 2), (24, 2)),
    (1, 1, (2, 2), (2, 2)),
    (1, 3000, (216, 2), (216, 2)),
    (7140, 28, (2, 510), (2, 510)),
]


@pytest.mark.parametrize(("width", "height", "at_4096", "at_16384"), TABLE)
def test_published_table(width, height, at_4096, at_16384):
    assert image_geometry(width, height).grid_hw == at_4096
    assert image_geometry(width, height, in_token_limit=16384).grid_hw == at_16384


@pytest.mark.parametrize("limit", [4096, 16384])
@pytest.mark.parametrize(("width", "height"), [(7154, 28), (20000, 28), (28, 7154)])
def test_a_side_of_512_patches_is_refused_with_both_numbers(width, height, limit):
    with pytest.raises(ValueError, match=rf"{width}x{height}.*512"):
        image_geometry(width, height, in_token_limit=limit)


@pytest.mark.parametrize(
    ("limit", "most", "grid", "example"),
    [(4096, 5352, (446, 12), (153, 6731)), (16384, 17856, (496, 36), (489, 7083))],
)
def test_largest_reachable_grid(limit, most, grid, example):
    """Sides of 14k + 13 lose the most to whole patches, so they reach the most; landscape mirrors portrait."""
    reached = 0
    for k in range(1, 140):
        for m in range(k, min(1500, k * 512 * 512 // limit + 30)):
            try:
                reached = max(reached, image_geometry(14 * k + 13, 14 * m + 13, in_token_limit=limit).patches)
            except ValueError:
                continue
    assert reached == most
    assert image_geometry(*example, in_token_limit=limit).grid_hw == grid
    assert image_geometry(*example[::-1], in_token_limit=limit).grid_hw == grid[::-1]


@pytest.mark.parametrize(("limit", "most"), [(4096, 66 * 66), (16384, 130 * 130)])
def test_largest_reachable_square(limit, most):
    assert max(image_geometry(side, side, in_token_limit=limit).patches for side in range(1, 4000)) == most


@given(st.integers(1, 30000), st.integers(1, 30000), st.sampled_from([1, 4, 100, 4096, 16384]))
@settings(max_examples=300, deadline=None)
def test_every_size_follows_the_rule(width, height, limit):
    try:
        geometry = image_geometry(width, height, in_token_limit=limit)
    except ValueError:
        assert max(oracle_size(width, height, limit)) > 510 * 14
        return
    size = oracle_size(width, height, limit)
    assert (geometry.resized_width, geometry.resized_height) == size
    assert (geometry.padded_width, geometry.padded_height) == tuple(-(-side // 28) * 28 for side in size)
    assert (geometry.grid_h * 14, geometry.grid_w * 14) == (geometry.padded_height, geometry.padded_width)
    assert geometry.patches == 4 * geometry.tokens == geometry.grid_h * geometry.grid_w
    padding = geometry.padded_width * geometry.padded_height - size[0] * size[1]
    assert geometry.padding_share == pytest.approx(padding / (geometry.padded_width * geometry.padded_height))


def test_without_padding_the_grid_is_the_whole_patches():
    geometry = image_geometry(100, 45, pad_input=False)
    assert (geometry.grid_hw, geometry.content_width, geometry.content_height) == ((3, 7), 98, 42)
    with pytest.raises(ValueError, match="3x7.*2x2"):
        _ = geometry.tokens
    with pytest.raises(ValueError, match="13x40.*14"):
        image_geometry(13, 40, pad_input=False)


def test_another_merge_kernel_pads_to_it():
    assert image_geometry(15, 15, merge_kernel_size=(4, 1)).grid_hw == (4, 2)
    assert num_tokens((4, 2), (4, 1)) == 2


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, None, "3"])
def test_sizes_and_limits_must_be_positive_integers(bad):
    with pytest.raises(ValueError, match="width"):
        image_geometry(bad, 10)
    with pytest.raises(ValueError, match="in_token_limit"):
        image_geometry(10, 10, in_token_limit=bad)


def test_a_grid_is_a_pair_that_counts():
    grid = Grid(4, 6)
    assert grid == (4, 6) and hash(grid) == hash((4, 6)) and {(4, 6): "found"}[grid] == "found"
    assert (grid.patches, grid.tokens(), grid.tokens((4, 3))) == (24, 6, 2)
    h, w = grid
    assert (h, w) == (4, 6) and json.dumps(grid) == "[4, 6]"
    with pytest.raises(ValueError, match="3x4.*2x2"):
        Grid(3, 4).tokens()


@pytest.mark.parametrize("form", [list, tuple, np.array, torch.tensor])
def test_every_source_of_grids_gives_them(form):
    (grid,) = as_grid_list(form([(4, 6)]))
    assert isinstance(grid, Grid) and type(grid.h) is type(grid.w) is int
    assert isinstance(image_geometry(640, 480).grid_hw, Grid)


def test_counts_of_lists():
    grids = [(2, 4), (6, 2), (2, 2)]
    assert patch_counts(grids) == [8, 12, 4]
    assert token_counts(grids) == [2, 3, 1]
    with pytest.raises(ValueError, match="3x4"):
        token_counts([(2, 2), (3, 4)])


@pytest.mark.parametrize("form", [list, np.array, torch.tensor])
def test_grid_lists_from_every_host_form(form):
    assert as_grid_list(form([(2, 4), (6, 2)])) == [(2, 4), (6, 2)]


@pytest.mark.parametrize(
    "bad", [[(2,)], [(2, 4, 6)], [(2.5, 4)], [(0, 4)], [(2, 512)], 5, torch.zeros(1, 2, device="meta")]
)
def test_bad_grids_are_refused(bad):
    with pytest.raises(ValueError, match="grid"):
        as_grid_list(bad)
