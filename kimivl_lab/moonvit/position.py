"""Learned position table, resampled to each image's grid by bicubic interpolation.

E(h, w) = bicubic(P, size=(h, w)), P the learned (64, 64, D) table, with the kernel constant -0.75, half-pixel centres
(align_corners false) and no antialias, row-major. A grid of the table's own size takes the table unchanged. Every
implementation computes in float32 and casts once:

    "interpolate"  torch's bicubic: the reference
    "gather"       16 weighted rows of the table for each patch
    "separable"    E = A_h P B_w^T. A_h (h, 64) and B_w (w, 64) hold 4 numbers a row: one axis is resampled with 4 taps,
                   then the other. The order that makes fewer rows comes first.
    "adaptive"     "gather" or "separable", the one that moves fewer rows: small grids are gathered
    "cached"       "adaptive" behind a `PositionCache`

An operator yields blocks of a few MiB, which stay in the processor's caches until the one cast that puts each into its
place. Tensors are cut by `narrow` and `unsqueeze`, never by indexing: indexing fails on fake GPU tensors without CUDA.

Source: Learnable2DInterpPosEmb of the published MoonViT; R. Keys, Cubic convolution interpolation, 1981.
Test: tests/test_position.py, tests/test_position_cache.py. Record: position__*.csv, position_cache__*.csv.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..geometry import GridLike, patch_counts
from ..kernels.dispatch import compute_dtype
from ..kernels.memory import empty_rows
from ..kernels.weight_state import WeightState
from .position_cache import PositionCache

KEYS_CONSTANT = -0.75
AXIS_CACHE_BYTES = 4 * 2**20

_BLOCK_BYTES = 4 * 2**20

AxisTaps = tuple[Tensor, Tensor]
AxisTapsOf = Callable[[int, int], AxisTaps]
PositionOperator = Callable[[Tensor, GridLike, AxisTapsOf], Iterator[Tensor]]


class Learnable2DInterpPosEmb(nn.Module):
    """The table; `weight` (height, width, dim) is the checkpoint's `patch_embed.pos_emb.weight`.

    "cached" fills `cache`; assign another `PositionCache` to change the policy. `axes` holds the taps of single axes,
    which depend on no weight. A call gives the embeddings of the grids, not patches plus embeddings as the published
    module does, because metadata is made before the patches are there.
    """

    def __init__(self, height: int, width: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(height, width, dim))
        self.cache = PositionCache()
        self.axes = PositionCache(max_bytes=AXIS_CACHE_BYTES)

    def forward(
        self, grid_hws: Sequence[GridLike], dtype: torch.dtype | None = None, implementation: str = "interpolate"
    ) -> Tensor:
        """`get_pos_embeds`, as a call of the module, so that its hooks run."""
        return self.get_pos_embeds(grid_hws, dtype, implementation)

    def get_pos_embeds(
        self, grid_hws: Sequence[GridLike], dtype: torch.dtype | None = None, implementation: str = "interpolate"
    ) -> Tensor:
        """(L, D) embeddings of all patches of `grid_hws`, packed image after image, on the table's device.

        Args:
            dtype: of the result; the table's when None.
            implementation: see the module. "cached" keeps nothing in training, while a gradient to the table is
                wanted, while a CUDA graph is captured, or where a change of the table could not be seen.
        """
        if implementation not in (*POSITION_OPERATORS, "cached"):
            known = ", ".join((*POSITION_OPERATORS, "cached"))
            raise ValueError(f"unknown position implementation {implementation!r}: one of {known}")
        weight = self.weight  # read once: a parametrisation computes it at every access
        dtype = dtype or weight.dtype
        taps = partial(self._taps, compute_dtype(weight.dtype), weight.device)
        if implementation == "cached" and self._may_cache(weight):
            return self._get_cached(weight, grid_hws, dtype, taps)
        operator = POSITION_OPERATORS.get(implementation, resample_adaptive)
        table = weight.to(compute_dtype(weight.dtype))
        return _pack(
            (block for grid in grid_hws for block in _resample(operator, table, grid, taps)), grid_hws, dtype, weight
        )

    def _get_cached(self, weight: Tensor, grid_hws: Sequence[GridLike], dtype: torch.dtype, taps: AxisTapsOf) -> Tensor:
        self.cache.watch(weight)
        table = cache(partial(weight.to, compute_dtype(weight.dtype)))  # cast once a call, when a grid is missing
        device = str(weight.device)

        def make(grid: GridLike) -> Tensor:
            return _pack(_resample(resample_adaptive, table(), grid, taps), [grid], dtype, weight)

        entries = (self.cache.get((*grid, dtype, device), partial(make, grid)) for grid in grid_hws)
        return _pack(entries, grid_hws, dtype, weight)

    def _may_cache(self, weight: Tensor) -> bool:
        # A weight that is no parameter is computed by a hook or a parametrisation, anew for each call.
        wants_gradient = torch.is_grad_enabled() and weight.requires_grad
        return (
            self._parameters.get("weight") is weight
            and WeightState.is_traceable(weight, self.cache.checked)
            and not (self.training or wants_gradient or torch.compiler.is_compiling())
        )

    def _taps(self, dtype: torch.dtype, device: torch.device, out_size: int, in_size: int) -> AxisTaps:
        key = (out_size, in_size, dtype, str(device))
        taps: AxisTaps = self.axes.get(key, lambda: axis_taps(out_size, in_size, dtype, device))
        return taps


def _resample(operator: PositionOperator, table: Tensor, grid: GridLike, taps: AxisTapsOf) -> Iterable[Tensor]:
    """Blocks of the embedding of `grid`; a grid of the table's own size takes the table unchanged."""
    return (table.flatten(0, 1),) if table.shape[:2] == grid else operator(table, grid, taps)


def _pack(blocks: Iterable[Tensor], grid_hws: Sequence[GridLike], dtype: torch.dtype, weight: Tensor) -> Tensor:
    """Consecutive rows of all `grid_hws` as one new (L, D) on the weight's device; cast and packed in one pass."""
    dim, device = weight.shape[-1], weight.device
    if device.type != "cpu":
        return torch.cat([torch.empty((0, dim), dtype=dtype, device=device), *(block.to(dtype) for block in blocks)])
    packed, start = empty_rows(sum(patch_counts(grid_hws)), dim, dtype), 0
    for block in blocks:
        packed.narrow(0, start, block.shape[0]).copy_(block)
        start += block.shape[0]
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
        weights = torch.cat((outer.narrow(1, 0, 1), inner, outer.narrow(1, 1, 1)), dim=-1)  # (out, 4)
        index = before.long().unsqueeze(1) + torch.arange(-1, 3, device=device)
        return index.clamp(0, in_size - 1), weights.to(dtype)


def resample_interpolate(table: Tensor, grid: GridLike, taps: AxisTapsOf) -> Iterator[Tensor]:
    """(H, W, D) table -> the (h*w, D) embedding: torch's bicubic."""
    channels_first = table.permute(2, 0, 1).unsqueeze(0)  # (1, D, H, W)
    resampled = F.interpolate(channels_first, size=grid, mode="bicubic", align_corners=False)  # (1, D, h, w)
    yield resampled.squeeze(0).permute(1, 2, 0).flatten(0, 1)


def resample_gather(table: Tensor, grid: GridLike, taps: AxisTapsOf) -> Iterator[Tensor]:
    """(H, W, D) table -> the (h*w, D) embedding in blocks: each patch a weighted sum of 16 rows."""
    (height, width), (h, w) = table.shape[:2], grid
    x_index, x_weight = taps(w, width)
    for y_index, y_weight in _blocks(taps(h, height), w * table.shape[-1] * table.element_size()):
        index = y_index.view(-1, 1, 4, 1) * width + x_index.view(1, -1, 1, 4)  # (block, w, 4, 4)
        weight = y_weight.view(-1, 1, 4, 1) * x_weight.view(1, -1, 1, 4)
        yield _weighted_rows(table.flatten(0, 1), index.flatten(2), weight.flatten(2))


def resample_separable(table: Tensor, grid: GridLike, taps: AxisTapsOf) -> Iterator[Tensor]:
    """(H, W, D) table -> the (h*w, D) embedding in blocks: one axis with 4 taps, then the other with 4."""
    (height, width), (h, w) = table.shape[:2], grid
    flat = table.flatten(0, 1)
    row_bytes = table.shape[-1] * table.element_size()
    x_index, x_weight = taps(w, width)
    span = partial(torch.arange, device=table.device)
    if h * width <= height * w:
        for y_index, y_weight in _blocks(taps(h, height), max(w, width) * row_bytes):
            index = y_index.unsqueeze(1) * width + span(width).unsqueeze(1)  # (block, W, 4)
            resampled = _weighted_rows(flat, index, y_weight.unsqueeze(1))  # (block * W, D)
            index = span(len(y_index)).view(-1, 1, 1) * width + x_index  # (block, w, 4)
            yield _weighted_rows(resampled, index, x_weight)
    else:
        resampled = _weighted_rows(flat, span(height).view(-1, 1, 1) * width + x_index, x_weight)  # (H * w, D)
        for y_index, y_weight in _blocks(taps(h, height), w * row_bytes):
            index = y_index.unsqueeze(1) * w + span(w).unsqueeze(1)  # (block, w, 4)
            yield _weighted_rows(resampled, index, y_weight.unsqueeze(1))


def resample_adaptive(table: Tensor, grid: GridLike, taps: AxisTapsOf) -> Iterator[Tensor]:
    """Whichever of the two above moves fewer rows: each tap is a row read, each row made is written and read once."""
    (height, width), (h, w) = table.shape[:2], grid
    between = min(h * width, height * w)
    gathered = 16 * h * w + 4 * h * w
    separated = 4 * (between + h * w) + 4 * (between + h * w)
    return (resample_separable if separated < gathered else resample_gather)(table, grid, taps)


def _blocks(axis: AxisTaps, bytes_per_row: int) -> Iterator[AxisTaps]:
    """Taps of consecutive output rows, as many as fit a block; all at once where there is no cache to fit."""
    index, weight = axis
    step = max(1, _BLOCK_BYTES // bytes_per_row) if index.device.type == "cpu" else index.shape[0]
    yield from zip(index.split(step), weight.split(step), strict=True)


def _weighted_rows(source: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """(rows, D), (a, b, taps) and weights that broadcast to it -> (a*b, D) sums of weighted rows."""
    weight = weight.expand(index.shape).flatten(0, 1)
    return F.embedding_bag(index.flatten(0, 1), source, per_sample_weights=weight, mode="sum")


POSITION_OPERATORS: dict[str, PositionOperator] = {
    "interpolate": resample_interpolate,
    "gather": resample_gather,
    "separable": resample_separable,
    "adaptive": resample_adaptive,
}
