"""RoPE-2D: the angles by which each patch's query and key are rotated, from its column and its row.

theta_i = 10000^(-4i/d), i = 0..d/4-1, d the head size. A patch at row y, column x has d/2 complex factors: slot 2i is
exp(j * x * theta_i), by the COLUMN; slot 2i+1 is exp(j * y * theta_i), by the ROW. Channels (2c, 2c+1) are the real and
imaginary part of slot c. Angles are float32; the product is float32, cast back to the dtype of q and k. Example: with
d = 72 the patch at row 3, column 5 has slot 0 = exp(5j) and slot 1 = exp(3j).

Factors are stored as float32 pairs (cos, sin). A pair has the memory of a complex64 number, so both forms are views of
one tensor. They are built from one short vector per axis. The fast way keeps this vector for each device and dtype, 72
KiB at d = 72, outside of the tower's buffers: no cast or move of the tower can round it.

`kimivl_lab.kernels.rotation` applies the factors.

Source: Rope2DPosEmb and apply_rope of the published MoonViT. (The docstrings of two serving engines exchange the axes;
their code computes the same as this.)
Test: tests/test_rope.py. Record: rope__*.csv.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..geometry import MAX_GRID_SIDE, GridLike
from .position_cache import PositionCache

THETA_BASE = 10000.0
AXIS_CACHE_BYTES = 2**20


class Rope2DPosEmb:
    """Makes the factors for a head of `dim` channels.

    ValueError if `dim` is no multiple of 4; from the methods, for a grid with a side above `MAX_GRID_SIDE`.
    """

    def __init__(self, dim: int) -> None:
        if dim % 4:
            raise ValueError(f"the head size must be a multiple of 4, got {dim}")
        self.dim = dim
        self.axes = PositionCache(max_bytes=AXIS_CACHE_BYTES)  # they depend on no weight

    def get_cos_sin(
        self, grid_hws: Sequence[GridLike], device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """(L, dim/2, 2) pairs (cos, sin) of all patches, image after image: the reference.

        Args:
            dtype: float32, or float64 for parity tests.
        """
        axis = self._axis(self._longest_side(grid_hws), device, dtype)  # (side, d/4, 2)
        parts = [axis.new_empty((0, self.dim // 2, 2))]
        for h, w in grid_hws:
            columns = axis.narrow(0, 0, w).unsqueeze(0).expand(h, -1, -1, -1)  # even slots
            rows = axis.narrow(0, 0, h).unsqueeze(1).expand(-1, w, -1, -1)  # odd slots
            parts.append(torch.stack((columns, rows), dim=-2).view(h * w, self.dim // 2, 2))
        return torch.cat(parts)

    def gather_cos_sin(
        self, positions: Tensor, grid_hws: Sequence[GridLike], dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """`get_cos_sin`, bit for bit, by one gather from a kept axis: three kernels for any number of images.

        Args:
            positions: (L, 2) integers (column, row) of each patch in its grid, as `pack_grid_arrays` writes them. The
                result is on their device.
        """
        self._longest_side(grid_hws)  # raises for one that the axis does not hold
        axis = torch.view_as_complex(self._whole_axis(positions.device, dtype))  # (MAX_GRID_SIDE, d/4)
        factors = axis.index_select(0, positions.flatten()).view(-1, 2, axis.shape[1])  # (L, column and row, d/4)
        return torch.view_as_real(factors.transpose(1, 2).flatten(1))

    def get_freqs_cis_by_seqlens_list(
        self, grid_hws: Sequence[GridLike], device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """(L, dim/2) complex factors of all patches, image after image: a view of `get_cos_sin`."""
        return torch.view_as_complex(self.get_cos_sin(grid_hws, device, dtype))

    def _longest_side(self, grid_hws: Sequence[GridLike]) -> int:
        for h, w in grid_hws:
            if max(h, w) > MAX_GRID_SIDE:
                raise ValueError(f"grid {h}x{w} exceeds the largest, {MAX_GRID_SIDE}x{MAX_GRID_SIDE}")
        return max((max(grid) for grid in grid_hws), default=0)

    def _whole_axis(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        def make() -> Tensor:
            with torch.inference_mode(False):  # kept for later calls, which may want gradients
                return self._axis(MAX_GRID_SIDE, device, dtype)

        return self.axes.get((str(device), dtype), make)

    def _axis(self, side: int, device: torch.device | str | None, dtype: torch.dtype) -> Tensor:
        """(side, d/4, 2): (cos, sin) of position * theta_i, for positions 0 to side - 1."""
        exponents = torch.arange(0, self.dim, 4, device=device, dtype=dtype) / self.dim
        angles = torch.arange(side, device=device).to(dtype).unsqueeze(-1) * (1.0 / THETA_BASE**exponents)
        return torch.stack((angles.cos(), angles.sin()), dim=-1)
