"""What the kernels need to know of the grids, as integers: offsets, merge order, and each patch's column and row.

    cu_seqlens        (m + 1,) int32, offsets of the images in patches; slots past the last image repeat the total
    merge_gather_idx  (L,) int64, the packed patch of each row in merged order
    positions         (L, 2) int32, (column, row) of each patch in its own grid

`grid_arrays_reference` is the plain builder; `pack_grid_arrays` writes the same into one buffer for one upload.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from ..geometry import Grid, patch_counts
from ..kernels.upload import PackedArrays
from .merger import write_merge_gather_idx
from .rope import write_positions


def grid_arrays_reference(
    grid_hws: Sequence[Grid], slots: int, merge_kernel_size: tuple[int, int]
) -> dict[str, Tensor]:
    """The three arrays as host tensors, image by image. `slots`: m, at least the number of images."""
    kh, kw = merge_kernel_size
    offsets = _offsets(grid_hws, slots)
    order, positions = [torch.empty(0, dtype=torch.int64)], [torch.empty((0, 2), dtype=torch.int64)]
    for start, (h, w) in zip(offsets, grid_hws, strict=False):
        patches = torch.arange(start, start + h * w).view(h // kh, kh, w // kw, kw)
        order.append(patches.transpose(1, 2).flatten())
        rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        positions.append(torch.stack((columns, rows), dim=-1).flatten(0, 1))
    return {
        "cu_seqlens": torch.tensor(offsets, dtype=torch.int32),
        "merge_gather_idx": torch.cat(order),
        "positions": torch.cat(positions).int(),
    }


def pack_grid_arrays(grid_hws: Sequence[Grid], slots: int, merge_kernel_size: tuple[int, int]) -> PackedArrays:
    """The same, ready to go to a device in one copy: 16 bytes a patch."""
    patches = sum(patch_counts(grid_hws))
    packed = PackedArrays(
        {
            "merge_gather_idx": ((patches,), np.int64),
            "positions": ((patches, 2), np.int32),
            "cu_seqlens": ((slots + 1,), np.int32),
        }
    )
    packed.arrays["cu_seqlens"][:] = _offsets(grid_hws, slots)
    write_merge_gather_idx(grid_hws, merge_kernel_size, packed.arrays["merge_gather_idx"])
    write_positions(grid_hws, packed.arrays["positions"])
    return packed


def _offsets(grid_hws: Sequence[Grid], slots: int) -> list[int]:
    offsets = list(accumulate(patch_counts(grid_hws), initial=0))
    return offsets + offsets[-1:] * (slots - len(grid_hws))
