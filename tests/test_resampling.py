"""The interpolation as matrices against torch in float64, and its counts against small cases by hand."""

import pytest
import torch
import torch.nn.functional as F

from kimivl_lab.lessons.resampling import (
    additive_share,
    axis_matrix,
    keys_weight,
    learned_table,
    needed_cells,
    operator_work,
    resample,
    torch_resample,
)


@pytest.mark.parametrize("grid", [(5, 8), (12, 3), (7, 9), (1, 40)])
def test_matrices_give_torchs_bicubic(grid):
    table = torch.randn(7, 9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(resample(table, grid), torch_resample(table, grid), atol=1e-12)
    if grid != (7, 9):
        assert not torch.allclose(resample(table, grid, c=-0.5), torch_resample(table, grid), atol=1e-3)


def test_aligned_corners_are_torchs():
    table = torch.randn(7, 9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = torch_resample(table, (5, 12), align_corners=True)
    assert torch.allclose(resample(table, (5, 12), corners=True), expected, atol=1e-12)


@pytest.mark.parametrize(("c", "antialias"), [(-0.75, False), (-0.5, True)])
def test_an_impulse_gives_the_weights(c, antialias):
    impulse = torch.zeros(1, 1, 1, 9, dtype=torch.float64)
    impulse[..., 4] = 1
    response = F.interpolate(impulse, (1, 90), mode="bicubic", antialias=antialias).flatten()
    offsets = (torch.arange(90, dtype=torch.float64) + 0.5) / 10 - 4.5
    assert torch.allclose(response, keys_weight(offsets, c), atol=1e-12)


def test_the_worked_line():
    line = axis_matrix(5, 8)[1]
    expected = torch.tensor([-0.00675, 0.08875, 0.97875, -0.06075, 0, 0, 0, 0], dtype=torch.float64)
    assert torch.allclose(line, expected, atol=1e-12)


def test_a_sum_of_a_row_and_a_column_is_additive():
    assert additive_share(torch.tensor([[1.0, 2], [3, 4]])[..., None]) == pytest.approx(1)
    assert additive_share(torch.tensor([[1.0, 2], [4, 3]])[..., None]) == pytest.approx(0.8)
    assert 0.96 < additive_share(learned_table()) < 0.98


def test_cells_and_work():
    assert needed_cells((4, 40)) == 1024 and needed_cells((36, 46)) == 4096
    touched = resample(torch.ones(64, 64, 1), (4, 40)).shape, int((axis_matrix(4, 64) != 0).any(0).sum())
    assert touched == ((4, 40, 1), 16)
    work = operator_work((36, 46))
    assert work["gather"].flops == 2 * 1152 * 26_496 and work["interpolate"].flops == 2 * 1152 * 33_120
    assert work["separable"].flops == 2 * 1152 * 4 * (36 * 64 + 1656)
    assert {one.moved for one in work.values()} == {(4096 + 1656) * 1152 * 4}
    assert operator_work((446, 12))["separable"].flops == 2 * 1152 * 4 * (64 * 12 + 5352)
