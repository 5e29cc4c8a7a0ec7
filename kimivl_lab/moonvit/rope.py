"""RoPE-2D: each patch's query and key turned by its column and its row.

theta_i = 10000^(-4i/d), i = 0..d/4-1, d the head size. A patch at row y, column x has d/2 complex factors: slot 2i is
exp(j * x * theta_i), by the COLUMN; slot 2i+1 is exp(j * y * theta_i), by the ROW. Channels (2c, 2c+1) are slot c's
real and imaginary part. Angles are float32; the product is float32, cast back to the input's dtype.

Rows are built from two short per-axis vectors: there is no 512x512 table and nothing is stored, so no cast or device
move of the module can round or lose an angle.

Source: Rope2DPosEmb and apply_rope of the published MoonViT. (Two serving engines' docstrings name the axes the other
way round; their code is as here.)
"""

from collections.abc import Sequence

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

    def get_freqs_cis_by_seqlens_list(
        self,
        grid_hws: Sequence[Grid],
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """(L, dim/2) complex factors of all patches, packed image after image.

        Args:
            dtype: of the angles, float32 (complex64 factors) or float64 (complex128).
        """
        cos, sin = self.get_cos_sin(grid_hws, device, dtype)
        return torch.complex(cos, sin)

    def get_cos_sin(
        self,
        grid_hws: Sequence[Grid],
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """(2, L, dim/2): cosines and sines of the same angles as `get_freqs_cis_by_seqlens_list`."""
        for h, w in grid_hws:
            if h > self.max_height or w > self.max_width:
                raise ValueError(f"grid {h}x{w} exceeds the largest, {self.max_height}x{self.max_width}")
        if not grid_hws:
            return torch.empty((2, 0, self.dim // 2), device=device, dtype=dtype)
        exponents = torch.arange(0, self.dim, 4, device=device, dtype=dtype) / self.dim
        theta = 1.0 / self.theta_base**exponents  # (d/4,)
        longest = max(max(grid) for grid in grid_hws)
        angles = torch.outer(torch.arange(longest, device=device, dtype=dtype), theta)  # (longest, d/4)
        axis = torch.stack((angles.cos(), angles.sin()))  # (2, longest, d/4)
        result = axis.new_empty((2, sum(h * w for h, w in grid_hws), self.dim // 2))
        start = 0
        for h, w in grid_hws:
            rows = result[:, start : start + h * w].view(2, h, w, self.dim // 4, 2)
            rows[..., 0] = axis[:, None, :w]  # column
            rows[..., 1] = axis[:, :h, None]  # row
            start += h * w
        return result


def apply_rope(q: Tensor, k: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """Turns q and k, (L, heads, d), by freqs_cis (L, d/2) complex: the reference. Same dtype out as in."""
    return _rotate(q, freqs_cis), _rotate(k, freqs_cis)


def _rotate(x: Tensor, freqs_cis: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.to(freqs_cis.real.dtype).unflatten(-1, (-1, 2)).contiguous())  # (L, heads, d/2)
    return torch.view_as_real(pairs * freqs_cis.unsqueeze(-2)).flatten(-2).to(x.dtype)
