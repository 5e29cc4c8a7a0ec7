"""2x2 patches -> one token: each window row-major inside, windows row-major over the image, images one after another.

`patch_merger` is the plain reference (a list, image by image); `patch_merger_packed` is one gather by an index built on
the host, so that nothing about the grids is read on the device. First group of a 4x6 grid: patches 0, 1, 6, 7.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..geometry import MERGE_KERNEL_SIZE, Grid, as_grid_list, patch_counts, token_counts


def patch_merger(
    x: Tensor, grid_hws: Sequence[Grid], merge_kernel_size: tuple[int, int] = MERGE_KERNEL_SIZE
) -> list[Tensor]:
    """(L, D) packed patches -> a list of (t_j, kh*kw, D), one per image: the reference."""
    kh, kw = merge_kernel_size
    check_merge(grid_hws, merge_kernel_size)
    merged = []
    for image, (h, w) in zip(x.split(patch_counts(grid_hws)), grid_hws, strict=True):
        windows = image.view(h // kh, kh, w // kw, kw, -1).transpose(1, 2)  # (h/kh, w/kw, kh, kw, D)
        merged.append(windows.reshape((h // kh) * (w // kw), kh * kw, -1))
    return merged


def build_merge_gather_idx(grid_hws: Sequence[Grid], merge_kernel_size: tuple[int, int] = MERGE_KERNEL_SIZE) -> Tensor:
    """(L,) int64 on the host: row r of the merged order is packed patch `index[r]`."""
    check_merge(grid_hws, merge_kernel_size)
    index = np.empty(sum(patch_counts(grid_hws)), dtype=np.int64)
    write_merge_gather_idx(grid_hws, merge_kernel_size, index)
    return torch.from_numpy(index)


def write_merge_gather_idx(grid_hws: Sequence[Grid], merge_kernel_size: tuple[int, int], out: np.ndarray) -> None:
    """`build_merge_gather_idx` into `out`, (L,) of an integer type; every grid is divisible by the kernel."""
    (kh, kw), start = merge_kernel_size, 0
    for h, w in grid_hws:
        end = start + h * w
        windows = np.arange(start, end).reshape(h // kh, kh, w // kw, kw).transpose(0, 2, 1, 3)
        out[start:end].reshape(windows.shape)[...] = windows
        start = end


def patch_merger_packed(x: Tensor, merge_gather_idx: Tensor, merge_size: int = 4) -> Tensor:
    """(L, D) packed patches -> (T, merge_size, D), T = L / merge_size, by one gather."""
    return x.index_select(0, merge_gather_idx).view(-1, merge_size, x.shape[-1])


def split_image_features(
    features: Tensor, grid_hws: Sequence[Grid] | Tensor, merge_kernel_size: tuple[int, int] = MERGE_KERNEL_SIZE
) -> list[Tensor]:
    """Packed features (T, ...) -> one view (t_j, ...) per image. ValueError if the grids do not add up to T tokens."""
    counts = token_counts(as_grid_list(grid_hws), merge_kernel_size)
    if sum(counts) != features.shape[0]:
        raise ValueError(f"features hold {features.shape[0]} tokens, the grids need {sum(counts)}")
    return list(features.split(counts))


def check_merge(grid_hws: Sequence[Grid], merge_kernel_size: tuple[int, int]) -> None:
    """ValueError naming the first grid that the merge kernel does not divide."""
    token_counts(grid_hws, merge_kernel_size)
