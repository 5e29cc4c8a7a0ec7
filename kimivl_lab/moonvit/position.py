"""Learned position table, resampled to each image's grid by bicubic interpolation.

E(h, w) = bicubic(P, size=(h, w)), P the learned (64, 64, D) table, with the kernel constant -0.75, half-pixel centres
(align_corners false) and no antialias, row-major; a grid of the table's own size takes the table unchanged. Every
implementation computes in float32 and casts once:

    "interpolate"  torch's bicubic: the reference
    "gather"       16 weighted rows of the table for each patch
    "separable"    E = A_h P B_w^T. A_h (h, 64) and B_w (w, 64) hold 4 numbers a row, so one axis is resampled with 4
                   taps, then the other with 4. The order that makes fewer rows comes first.
    "cached"       "separable" behind a `PositionCache`

Source: Learnable2DInterpPosEmb of the published MoonViT; R. Keys, Cubic convolution interpolation, 1981.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..geometry import Grid
from .position_cache import PositionCache
from .precision import compute_dtype

KEYS_CONSTANT = -0.75
AXIS_CACHE_BYTES = 4 * 2**20

AxisTaps = tuple[Tensor, Tensor]
PositionOperator = Callable[[Tensor, Grid, Callable[[int, int], AxisTaps]], Tensor]


class Learnable2DInterpPosEmb(nn.Module):
    """The table; `weight` (height, width, dim) is the checkpoint's `patch_embed.pos_emb.weight`.

    `cache` is what "cached" fills; replace it to change the policy. `axes` holds the taps of single axes, which depend
    on no weight.
    """

    def __init__(self, height: int, width: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(height, width, dim))
        self.cache = PositionCache()
        self.axes = PositionCache(max_bytes=AXIS_CACHE_BYTES)

    def get_pos_embeds(
        self, grid_hws: Sequence[Grid], dtype: torch.dtype | None = None, implementation: str = "interpolate"
    ) -> Tensor:
        """(L, D) embeddings of all patches of `grid_hws`, packed image after image, on the table's device.

        Args:
            dtype: of the result; the table's when None.
            implementation: see the module. "cached" keeps nothing in training, while a gradient to the table is
                wanted, or while a CUDA graph is captured.
        """
        if implementation not in (*POSITION_OPERATORS, "cached"):
            known = ", ".join((*POSITION_OPERATORS, "cached"))
            raise ValueError(f"unknown position implementation {implementation!r}: one of {known}")
        dtype = dtype or self.weight.dtype
        if implementation == "cached" and self._may_cache():
            return self._get_cached(grid_hws, dtype)
        operator = POSITION_OPERATORS.get(implementation, resample_separable)
        table = self._table()
        parts = [operator(table, grid, self._taps) for grid in grid_hws]
        return parts[0].to(dtype) if len(parts) == 1 else self._pack(parts, dtype)

    def _get_cached(self, grid_hws: Sequence[Grid], dtype: torch.dtype) -> Tensor:
        self.cache.watch(self.weight)
        table = cache(self._table)  # cast at most once a call, and only when a grid is missing

        def make(grid: Grid) -> Tensor:
            return resample_separable(table(), grid, self._taps).to(dtype)

        device = str(self.weight.device)
        parts = [self.cache.get((*grid, dtype, device), partial(make, grid)) for grid in grid_hws]
        return self._pack(parts, dtype)

    def _may_cache(self) -> bool:
        weight = self.weight
        wants_gradient = torch.is_grad_enabled() and weight.requires_grad
        plain = type(weight) in (nn.Parameter, Tensor) and not weight.is_inference()  # else changes leave no trace
        capturing = weight.is_cuda and torch.cuda.is_current_stream_capturing()
        return plain and not (self.training or wants_gradient or capturing or torch.compiler.is_compiling())

    def _table(self) -> Tensor:
        return self.weight.to(compute_dtype(self.weight.dtype))

    def _taps(self, out_size: int, in_size: int) -> AxisTaps:
        table_dtype, device = compute_dtype(self.weight.dtype), self.weight.device
        key = (out_size, in_size, table_dtype, str(device))
        taps: AxisTaps = self.axes.get(key, lambda: axis_taps(out_size, in_size, table_dtype, device))
        return taps

    def _pack(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """A new tensor of all rows; cast and packed in one pass."""
        packed = self.weight.new_empty((sum(part.shape[0] for part in parts), self.weight.shape[-1]), dtype=dtype)
        start = 0
        for part in parts:
            packed[start : start + part.shape[0]].copy_(part)
            start += part.shape[0]
        return packed


def axis_taps(out_size: int, in_size: int, dtype: torch.dtype, device: torch.device | str) -> AxisTaps:
    """Bicubic resampling of one axis: (out, 4) int64 source positions, clamped at the borders, and their weights.

    With t the centre's distance from the position before it, a tap at distance d weighs
    (a+2)d^3 - (a+3)d^2 + 1 for d <= 1 and a(d^3 - 5d^2 + 8d - 4) for d < 2, a = -0.75. In float64, cast once.
    """
    a = KEYS_CONSTANT
    with torch.inference_mode(False):  # kept for later calls, which may want gradients
        centre = (torch.arange(out_size, dtype=torch.float64, device=device) + 0.5) * (in_size / out_size) - 0.5
        before = centre.floor()
        t = centre - before
        near = torch.stack((t, 1 - t), dim=-1)  # distances of the two inner taps
        far = near + 1
        inner = ((a + 2) * near - (a + 3)) * near * near + 1
        outer = ((far - 5) * far + 8) * far * a - 4 * a
        weights = torch.cat((outer[:, :1], inner, outer[:, 1:]), dim=-1)  # (out, 4)
        index = before.long()[:, None] + torch.arange(-1, 3, device=device)
        return index.clamp(0, in_size - 1), weights.to(dtype)


def resample_interpolate(table: Tensor, grid: Grid, taps: Callable[[int, int], AxisTaps] | None = None) -> Tensor:
    """(H, W, D) table -> (h*w, D): torch's bicubic."""
    if table.shape[:2] == grid:
        return table.flatten(0, 1).clone()
    channels_first = table.permute(2, 0, 1).unsqueeze(0)  # (1, D, H, W)
    resampled = F.interpolate(channels_first, size=grid, mode="bicubic", align_corners=False)  # (1, D, h, w)
    return resampled.squeeze(0).permute(1, 2, 0).flatten(0, 1)


def resample_gather(table: Tensor, grid: Grid, taps: Callable[[int, int], AxisTaps]) -> Tensor:
    """(H, W, D) table -> (h*w, D): each patch a weighted sum of 16 rows."""
    (height, width), (h, w) = table.shape[:2], grid
    if (height, width) == grid:
        return table.flatten(0, 1).clone()
    (y_index, y_weight), (x_index, x_weight) = taps(h, height), taps(w, width)
    index = y_index[:, None, :, None] * width + x_index[None, :, None, :]  # (h, w, 4, 4)
    weight = y_weight[:, None, :, None] * x_weight[None, :, None, :]
    return _weighted_rows(table.flatten(0, 1), index.flatten(2), weight.flatten(2))


def resample_separable(table: Tensor, grid: Grid, taps: Callable[[int, int], AxisTaps]) -> Tensor:
    """(H, W, D) table -> (h*w, D): one axis with 4 taps, then the other with 4."""
    (height, width), (h, w) = table.shape[:2], grid
    if (height, width) == grid:
        return table.flatten(0, 1).clone()
    (y_index, y_weight), (x_index, x_weight) = taps(h, height), taps(w, width)
    span = partial(torch.arange, device=table.device)
    if h * width <= height * w:
        index = y_index[:, None] * width + span(width)[None, :, None]  # (h, W, 4)
        rows = _weighted_rows(table.flatten(0, 1), index, y_weight[:, None])  # (h*W, D)
        return _weighted_rows(rows, span(h)[:, None, None] * width + x_index, x_weight)  # (h*w, D)
    index = span(height)[:, None, None] * width + x_index  # (H, w, 4)
    columns = _weighted_rows(table.flatten(0, 1), index, x_weight)  # (H*w, D)
    return _weighted_rows(columns, y_index[:, None] * w + span(w)[None, :, None], y_weight[:, None])  # (h*w, D)


def _weighted_rows(source: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """(rows, D), (a, b, taps) and weights that broadcast to it -> (a*b, D) sums of weighted rows."""
    weight = weight.expand(index.shape).flatten(0, 1)
    return F.embedding_bag(index.flatten(0, 1), source, per_sample_weights=weight, mode="sum")


POSITION_OPERATORS: dict[str, PositionOperator] = {
    "interpolate": resample_interpolate,
    "gather": resample_gather,
    "separable": resample_separable,
}
