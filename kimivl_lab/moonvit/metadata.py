"""Everything that depends on the grids, built once per batch, on the host, by one function.

Eager forwards, graph capture and graph replay all use it. After it, a forward reads nothing back from the device:
lengths, offsets and counts are host integers, and the arrays that kernels need go to the device in ONE copy that the
host does not wait for. For the grids 2x4 and 2x2 in three slots:

    cu_seqlens        (m + 1,) int32   0 8 12 12: where each image starts, in patches; unused slots repeat the total
    merge_gather_idx  (L,) int64       0 1 4 5 | 2 3 6 7 | 8 9 10 11: the packed patch of each row in merged order
    positions         (L, 2) int32     0,0 1,0 2,0 3,0 0,1 ...: (column, row) of each patch in its grid

The device turns `positions` into the angles of `rope_cos_sin`: 8 bytes a patch are copied instead of 288, and the
number of kernel launches does not depend on the number of images.

`grid_arrays_reference` is the plain builder of the three arrays. `pack_grid_arrays` writes the same values into one
buffer. The names of the fields are those of vLLM's `prepare_encoder_metadata`.

Test: tests/test_metadata_upload.py, tests/test_tower_syncs.py. Record: metadata__*.csv.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ..checks import segment_lengths
from ..geometry import MERGE_KERNEL_SIZE, Grid, GridLike, as_grid_list, patch_counts, token_counts
from ..kernels.dispatch import compute_dtype, is_traced
from ..kernels.memory import PackedArrays, upload
from .position import Learnable2DInterpPosEmb
from .rope import Rope2DPosEmb


@dataclass(frozen=True)
class EncoderMetadata:
    """Grid-dependent inputs of one forward over L patches of n images (m >= n image slots).

    Attributes:
        grid_hws: the n grids (h, w), host integers.
        pos_embeds: (L, D), the tower's dtype.
        rope_cos_sin: (L, head_dim/2, 2), float32 pairs (cos, sin).
        cu_seqlens: (m + 1,) int32, offsets of the images in patches; the tail past n repeats L.
        max_seqlen: an upper bound of the longest image in PATCHES; any larger bound gives the same values.
        merge_gather_idx: (L,) int64, packed patch of each row in merged order.
        seqlens: lengths of the images (of the segments between the offsets) in patches, host integers.

    Raises:
        ValueError: offsets on the host that do not rise from 0 to L, or a bound below the longest image. This is their
            one check: the layers do not repeat it. Offsets on a device are not read; they must be those of the grids.
    """

    grid_hws: tuple[Grid, ...]
    pos_embeds: Tensor
    rope_cos_sin: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    merge_gather_idx: Tensor

    # False inside a captured graph: there the lengths change with each replay, and `cu_seqlens` alone holds them.
    lengths_on_host: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.cu_seqlens.dtype != torch.int32:
            raise ValueError(f"cu_seqlens must be int32, got {self.cu_seqlens.dtype}")
        lengths = patch_counts(self.grid_hws)
        object.__setattr__(self, "_num_patches", sum(lengths))  # as a frozen dataclass sets what it computes
        if self.lengths_on_host and self.cu_seqlens.device.type == "cpu" and not is_traced(self.cu_seqlens):
            offsets, total = self.cu_seqlens.tolist(), sum(lengths)
            lengths = [length for length in segment_lengths(offsets, total, self.max_seqlen) if length]
            if offsets[-1] != total:
                raise ValueError(f"cu_seqlens must end at {total}, the patches of the grids, got {offsets!r:.200}")
        object.__setattr__(self, "_seqlens", lengths)

    @property
    def seqlens(self) -> list[int]:
        return vars(self)["_seqlens"]

    @property
    def num_patches(self) -> int:
        return vars(self)["_num_patches"]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "EncoderMetadata":
        """The same metadata with its tensors on `device`."""
        tensors = [field.name for field in fields(self) if isinstance(getattr(self, field.name), Tensor)]
        there = replace(self, **{name: getattr(self, name).to(device, non_blocking=non_blocking) for name in tensors})
        object.__setattr__(there, "_seqlens", vars(self)["_seqlens"])  # which it cannot read from a device
        return there


def prepare_encoder_metadata(
    grid_hws: Sequence[GridLike] | Tensor,
    *,
    pos_emb: Learnable2DInterpPosEmb,
    rope: Rope2DPosEmb,
    merge_kernel_size: tuple[int, int],
    max_images: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    position: str = "interpolate",
) -> EncoderMetadata:
    """Builds the metadata of one packed batch. The library has no other builder.

    Args:
        grid_hws: (n, 2) host integers (h, w) in patches: a list of pairs, an array or a host tensor.
        max_images: image slots in `cu_seqlens` (n when None); unused slots are empty segments at the end.
        device, dtype: of the result; the position table's when None.
        position: implementation of the position embedding, see `kimivl_lab.moonvit.position`.

    Raises:
        ValueError: grids that are not (n, 2) positive host integers, are not divisible by the merge kernel, or are more
            than `max_images`.
    """
    grids = as_grid_list(grid_hws)
    slots = len(grids) if max_images is None else max_images
    if len(grids) > slots:
        raise ValueError(f"{len(grids)} images do not fit max_images={slots}")
    device = pos_emb.weight.device if device is None else torch.device(device)
    dtype = pos_emb.weight.dtype if dtype is None else dtype

    arrays = pack_grid_arrays(grids, slots, merge_kernel_size).to(device)
    return EncoderMetadata(
        grid_hws=tuple(grids),
        pos_embeds=upload(pos_emb(grids, dtype, position), device),
        rope_cos_sin=rope.gather_cos_sin(arrays["positions"], grids, compute_dtype(dtype)),
        cu_seqlens=arrays["cu_seqlens"],
        max_seqlen=max(patch_counts(grids), default=0),
        merge_gather_idx=arrays["merge_gather_idx"],
    )


def grid_arrays_reference(
    grid_hws: Sequence[Grid], slots: int, merge_kernel_size: tuple[int, int] = MERGE_KERNEL_SIZE
) -> dict[str, Tensor]:
    """The three arrays of the module's docstring as host tensors, built image by image: the reference.

    Args:
        slots: m, the image slots in `cu_seqlens`, at least the number of images.
    """
    kh, kw = merge_kernel_size
    offsets = _offsets(grid_hws, slots)
    order = [torch.empty(0, dtype=torch.int64, device="cpu")]
    positions = [torch.empty((0, 2), dtype=torch.int64, device="cpu")]
    for start, (h, w) in zip(offsets, grid_hws, strict=False):
        patches = torch.arange(start, start + h * w, device="cpu").view(h // kh, kh, w // kw, kw)
        order.append(patches.transpose(1, 2).flatten())
        rows, columns = torch.meshgrid(torch.arange(h, device="cpu"), torch.arange(w, device="cpu"), indexing="ij")
        positions.append(torch.stack((columns, rows), dim=-1).flatten(0, 1))
    return {
        "cu_seqlens": torch.tensor(offsets, dtype=torch.int32, device="cpu"),
        "merge_gather_idx": torch.cat(order),
        "positions": torch.cat(positions).int(),
    }


def pack_grid_arrays(
    grid_hws: Sequence[GridLike], slots: int, merge_kernel_size: tuple[int, int] = MERGE_KERNEL_SIZE
) -> PackedArrays:
    """`grid_arrays_reference` in one buffer, 16 bytes a patch, for one copy to the device.

    ValueError naming the first grid that the merge kernel does not divide.
    """
    token_counts(grid_hws, merge_kernel_size)
    patches = sum(patch_counts(grid_hws))
    packed = PackedArrays(  # the widest type first, so that no gaps are needed
        {
            "merge_gather_idx": ((patches,), np.int64),
            "positions": ((patches, 2), np.int32),
            "cu_seqlens": ((slots + 1,), np.int32),
        }
    )
    packed.arrays["cu_seqlens"][:] = offsets = _offsets(grid_hws, slots)
    kh, kw = merge_kernel_size
    for start, (h, w) in zip(offsets, grid_hws, strict=False):
        image = slice(start, start + h * w)
        windows = np.arange(start, start + h * w).reshape(h // kh, kh, w // kw, kw).transpose(0, 2, 1, 3)
        packed.arrays["merge_gather_idx"][image].reshape(windows.shape)[...] = windows  # written without a copy
        columns_rows = packed.arrays["positions"][image].reshape(h, w, 2)
        columns_rows[..., 0] = np.arange(w)
        columns_rows[..., 1] = np.arange(h)[:, np.newaxis]
    return packed


def build_merge_gather_idx(
    grid_hws: Sequence[GridLike], merge_kernel_size: tuple[int, int] = MERGE_KERNEL_SIZE
) -> Tensor:
    """(L,) int64 on the host: row r of the merged order is packed patch `index[r]`; for one 2x4 grid 0 1 4 5 2 3 6 7.

    ValueError naming the first grid that the merge kernel does not divide.
    """
    return pack_grid_arrays(grid_hws, len(grid_hws), merge_kernel_size).to("cpu")["merge_gather_idx"]


def _offsets(grid_hws: Sequence[GridLike], slots: int) -> list[int]:
    """Lengths 8, 4 in three slots give [0, 8, 12, 12]."""
    offsets = list(accumulate(patch_counts(grid_hws), initial=0))
    return offsets + offsets[-1:] * (slots - len(grid_hws))
