"""Merges 2x2 patches into one token: windows row by row over the image, patches row by row in each window.

`patch_merger` is the reference: a list, image by image. `patch_merger_packed` is one gather by an index that
`kimivl_lab.moonvit.metadata` builds on the host, so the device reads nothing about the grids. Example: the first token
of a 4x6 grid is made of patches 0, 1, 6, 7.

Test: tests/test_tower.py, tests/test_parity.py.
"""

from collections.abc import Sequence

from torch import Tensor

from ..geometry import MERGE_KERNEL_SIZE, Grid, as_grid_list, patch_counts, token_counts


def patch_merger(
    x: Tensor, grid_hws: Sequence[Grid], merge_kernel_size: tuple[int, int] = MERGE_KERNEL_SIZE
) -> list[Tensor]:
    """(L, D) packed patches -> a list of (t_j, kh*kw, D), one per image: the reference.

    ValueError naming the first grid that the merge kernel does not divide.
    """
    kh, kw = merge_kernel_size
    merged, tokens = [], token_counts(grid_hws, merge_kernel_size)
    for image, count, (h, w) in zip(x.split(patch_counts(grid_hws)), tokens, grid_hws, strict=True):
        windows = image.view(h // kh, kh, w // kw, kw, -1).transpose(1, 2)  # (h/kh, w/kw, kh, kw, D)
        merged.append(windows.reshape(count, kh * kw, -1))
    return merged


def patch_merger_packed(x: Tensor, merge_gather_idx: Tensor, merge_size: int = 4) -> Tensor:
    """(L, D) packed patches -> (T, merge_size, D), T = L / merge_size, by one gather."""
    return x.index_select(0, merge_gather_idx).view(-1, merge_size, x.shape[-1])


def split_image_features(
    features: Tensor, grid_hws: Sequence[Grid] | Tensor, merge_kernel_size: tuple[int, int] = MERGE_KERNEL_SIZE
) -> list[Tensor]:
    """Cuts packed features (T, ...) into one view (t_j, ...) per image.

    ValueError if the tokens of the grids do not add up to T. Example: 10 tokens of grids 4x6 and 4x4 are cut into 6 and
    4.
    """
    counts = token_counts(as_grid_list(grid_hws), merge_kernel_size)
    if sum(counts) != features.shape[0]:
        raise ValueError(f"features hold {features.shape[0]} tokens, the grids need {sum(counts)}")
    return list(features.split(counts))
