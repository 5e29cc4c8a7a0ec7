"""Learned position table, resampled to each image's grid by bicubic interpolation.

E(h, w) = bicubic(P, size=(h, w)), P the learned (64, 64, D) table, with the kernel constant -0.75, half-pixel centres
(align_corners false) and no antialias, row-major; a grid of the table's own size takes the table unchanged. Computed in
float32 and cast once.

Source: Learnable2DInterpPosEmb of the published MoonViT.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..geometry import Grid
from .precision import compute_dtype


class Learnable2DInterpPosEmb(nn.Module):
    """The table; `weight` (height, width, dim) is the checkpoint's `patch_embed.pos_emb.weight`."""

    def __init__(self, height: int, width: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(height, width, dim))

    def get_pos_embeds(self, grid_hws: Sequence[Grid], dtype: torch.dtype | None = None) -> Tensor:
        """(L, D) embeddings of all patches of `grid_hws`, packed image after image, on the table's device.

        Args:
            dtype: of the result; the table's when None.
        """
        dtype = dtype or self.weight.dtype
        if not grid_hws:
            return self.weight.new_empty((0, self.weight.shape[-1]), dtype=dtype)
        return torch.cat([interpolate_table(self.weight, grid).to(dtype) for grid in grid_hws])


def interpolate_table(table: Tensor, grid: Grid) -> Tensor:
    """(h*w, D) in float32 (float64 for a float64 table): torch's bicubic, the reference."""
    h, w = grid
    table = table.to(compute_dtype(table.dtype))
    if table.shape[:2] == (h, w):
        return table.flatten(0, 1)
    channels_first = table.permute(2, 0, 1).unsqueeze(0)  # (1, D, 64, 64)
    resampled = F.interpolate(channels_first, size=(h, w), mode="bicubic", align_corners=False)  # (1, D, h, w)
    return resampled.squeeze(0).permute(1, 2, 0).flatten(0, 1)
