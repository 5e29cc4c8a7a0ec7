"""RoPE-2D: each patch's query and key turned by its column and its row.

theta_i = 10000^(-4i/d), i = 0..d/4-1, d the head size. A patch at row y, column x has d/2 complex factors: slot 2i is
exp(j * x * theta_i), by the COLUMN; slot 2i+1 is exp(j * y * theta_i), by the ROW. Channels (2c, 2c+1) are slot c's
real and imaginary part. Angles are float32; the product is float32, cast back to the input's dtype.

Factors are stored as (cos, sin) pairs, float32: the memory of a complex64 number, so both forms are views of one
tensor. Rows are built from short per-axis vectors: there is no 512x512 table and no buffer, so no cast or device move
of the tower can round or lose an angle.

`kimivl_lab.kernels.rotation` turns q and k by these factors.

Source: Rope2DPosEmb and apply_rope of the published MoonViT. (Two serving engines' docstrings name the axes the other
way round; their code is as here.)
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..geometry import MAX_GRID_SIDE, Grid


class Rope2DPosEmb:
    """Angles for a head of `dim` channels; grids of up to `max_height` x `max_width` patches."""

    def __init__(
        self, dim: int, max_height: int = MAX_GRID_SIDE, max_width: int = MAX_GRID_SIDE, theta_base: float = 10000.0
    ) -> None:
        if dim % 4:
            raise ValueError(f"the head size must be a multiple of 4, got {dim}")
        self.dim = dim
        self.max_height = max_height
        self.max_width = max_width
        self.theta_base = theta_base

    def get_cos_sin(
        self,
        grid_hws: Sequence[Grid],
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """(L, dim/2, 2) pairs (cos, sin) of all patches, packed image after image.

        Args:
            dtype: float32, or float64 for parity tests.
        """
        axis = self._axis(torch.arange(self._longest_side(grid_hws), device=device), dtype)  # (longest, d/4, 2)
        parts = [axis.new_empty((0, self.dim // 2, 2))]
        for h, w in grid_hws:
            columns = axis.narrow(0, 0, w).unsqueeze(0).expand(h, -1, -1, -1)  # even slots
            rows = axis.narrow(0, 0, h).unsqueeze(1).expand(-1, w, -1, -1)  # odd slots
            parts.append(torch.stack((columns, rows), dim=-2).view(h * w, self.dim // 2, 2))
        return torch.cat(parts)

    def gather_cos_sin(self, positions: Tensor, grid_hws: Sequence[Grid], dtype: torch.dtype = torch.float32) -> Tensor:
        """`get_cos_sin`, bit for bit, on the device of `positions` (L, 2), which `write_positions` filled.

        As many kernels whatever the number of images.
        """
        side = torch.arange(self._longest_side(grid_hws), device=positions.device)
        axis = torch.view_as_complex(self._axis(side, dtype))  # (longest, d/4)
        factors = axis.index_select(0, positions.flatten()).view(-1, 2, axis.shape[1])  # (L, column and row, d/4)
        return torch.view_as_real(factors.transpose(1, 2).flatten(1))

    def get_freqs_cis_by_seqlens_list(
        self,
        grid_hws: Sequence[Grid],
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """(L, dim/2) complex factors of all patches, packed image after image: a view of `get_cos_sin`."""
        return torch.view_as_complex(self.get_cos_sin(grid_hws, device, dtype))

    def get_freqs_cis_by_idx(self, pos_idx: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """(..., dim/2) complex factors of patches at `pos_idx` (..., 2), integer pairs (row, column)."""
        axis = self._axis(pos_idx, dtype)  # (..., 2, d/4, 2)
        row, column = axis.unbind(-3)
        return torch.view_as_complex(torch.stack((column, row), dim=-2)).flatten(-2)

    def _longest_side(self, grid_hws: Sequence[Grid]) -> int:
        for h, w in grid_hws:
            if h > self.max_height or w > self.max_width:
                raise ValueError(f"grid {h}x{w} exceeds the largest, {self.max_height}x{self.max_width}")
        return max((max(grid) for grid in grid_hws), default=0)

    def _axis(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """(..., d/4, 2): (cos, sin) of position * theta_i."""
        exponents = torch.arange(0, self.dim, 4, device=positions.device, dtype=dtype) / self.dim
        angles = positions.to(dtype).unsqueeze(-1) * (1.0 / self.theta_base**exponents)
        return torch.stack((angles.cos(), angles.sin()), dim=-1)


def write_positions(grid_hws: Sequence[Grid], out: np.ndarray) -> None:
    """Fills `out`, (L, 2) of an integer type, with each patch's (column, row) in its own grid."""
    start = 0
    for h, w in grid_hws:
        grid = out[start : start + h * w].reshape(h, w, 2)
        grid[..., 0] = np.arange(w)
        grid[..., 1] = np.arange(h)[:, np.newaxis]
        start += h * w
