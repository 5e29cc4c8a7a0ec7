"""The interpolation of a position table, written as matrices, for notebook 20: slow, exact, and with its choices open.

    matrix = axis_matrix(5, 8)                   # (5, 8): line j holds the weights of output position j
    embedding = resample(table, (32, 46))        # (32, 46, D) in float64
    wrong = resample(table, (32, 46), c=-0.5)    # another constant, for the controls that must fail

Use it as the reference that a learner's code and the library's operators are compared with. It has nothing in common
with `moonvit.position` but the formula.
Example: of 5 positions on 8 cells, position 1 lies at 1.9 and takes cells 0 to 3 with the weights -0.007, 0.089, 0.979
and -0.061.
Test: tests/test_resampling.py. Data: data/position_table.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..datasets import data_path
from ..geometry import GridLike
from .stages import Work

TRAINED_CONSTANT = -0.75


def learned_table() -> Tensor:
    """The position table of DINOv2 ViT-S/14: (37, 37, 384), float64. Kimi-VL's is part of its checkpoint."""
    stored = np.load(data_path("position_table", "dinov2_vits14_pos_embed_37x37x384_fp16.npz"))
    return torch.from_numpy(stored["pos_embed"]).double().view(37, 37, 384)


def additive_share(table: Tensor) -> float:
    """The share of a table's variance that a vector of the row plus a vector of the column explains, 0 to 1.

    Example: [[1, 2], [3, 4]] has the share 1, [[1, 2], [4, 3]] has 0.8.
    """
    centred = table - table.mean((0, 1))
    rest = centred - centred.mean(1, keepdim=True) - centred.mean(0, keepdim=True)
    return 1 - (rest.norm() / centred.norm()).item() ** 2


def keys_weight(distance: Tensor, c: float = TRAINED_CONSTANT) -> Tensor:
    """The weight of a tap at each distance, in table cells; 0 from distance 2 on."""
    d = distance.abs()
    near = (c + 2) * d**3 - (c + 3) * d**2 + 1
    far = c * (d**3 - 5 * d**2 + 8 * d - 4)
    return torch.where(d <= 1, near, torch.where(d < 2, far, torch.zeros_like(d)))


def axis_matrix(out_size: int, in_size: int, c: float = TRAINED_CONSTANT, corners: bool = False) -> Tensor:
    """(out_size, in_size), float64: line j holds the weights of output position j on the cells of one axis.

    Args:
        c: the constant of the weights.
        corners: aligned corners in place of half-pixel centres; a wrong choice for MoonViT.
    """
    j = torch.arange(out_size, dtype=torch.float64)
    centre = j * (in_size - 1) / (out_size - 1) if corners else (j + 0.5) * in_size / out_size - 0.5
    cells = centre.floor()[:, None] + torch.arange(-1, 3)  # (out_size, 4)
    weights = keys_weight(centre[:, None] - cells, c)
    matrix = torch.zeros(out_size, in_size, dtype=torch.float64)
    return matrix.scatter_add(1, cells.long().clamp(0, in_size - 1), weights)


def resample(table: Tensor, grid: GridLike, **choices: Any) -> Tensor:
    """(H, W, D) -> (h, w, D) in float64: one matrix for each axis. `choices` go to `axis_matrix`."""
    rows, columns = (axis_matrix(out, size, **choices) for out, size in zip(grid, table.shape[:2], strict=True))
    return torch.einsum("yi,xj,ijd->yxd", rows, columns, table.double())


def torch_resample(table: Tensor, grid: GridLike, mode: str = "bicubic", **choices: Any) -> Tensor:
    """(H, W, D) -> (h, w, D): torch's own interpolation, in the table's dtype."""
    channels_first = table.permute(2, 0, 1).unsqueeze(0)  # (1, D, H, W)
    return F.interpolate(channels_first, size=tuple(grid), mode=mode, **choices)[0].permute(1, 2, 0)


def needed_cells(grid: GridLike, side: int = 64) -> int:
    """Cells of the (side, side) table that the taps of a grid can touch: at most 4 for each row and each column.

    Example: the grid 4 x 40 needs 16 x 64 = 1,024 of the 4,096 cells.
    """
    return min(4 * grid[0], side) * min(4 * grid[1], side)


def operator_work(grid: GridLike, width: int = 1152, side: int = 64, itemsize: int = 4) -> dict[str, Work]:
    """Operator -> FLOPs and fewest bytes of one embedding, for a (side, side, width) table.

    The bytes are the same for all operators: the table's cells that the grid needs, read once, and the result.
    """
    h, w = grid
    sums = {
        "interpolate": (16 + 4) * h * w,  # 4 taps in each of 4 rows, then those 4
        "gather": 16 * h * w,
        "separable": 4 * min(h * side, side * w) + 4 * h * w,
    }
    moved = (needed_cells(grid, side) + h * w) * width * itemsize
    return {name: Work(2 * width * count, moved) for name, count in sums.items()}
