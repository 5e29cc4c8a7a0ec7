"""Everything that depends on the grids, built once on the host, by one function, for eager, capture and replay.

After it a forward reads nothing back from the device: lengths, offsets and counts exist as host integers, and what the
kernels need is on its way to the device, in one copy that the host does not wait for. Angles are made there, from 8
bytes a patch instead of their own 288, by as many kernels whatever the images. Field names are vLLM's
`prepare_encoder_metadata`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ..geometry import Grid, as_grid_list, patch_counts, token_counts
from ..kernels.precision import compute_dtype
from ..kernels.upload import upload
from .grid_arrays import pack_grid_arrays
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
    """

    grid_hws: tuple[Grid, ...]
    pos_embeds: Tensor
    rope_cos_sin: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    merge_gather_idx: Tensor

    @property
    def seqlens(self) -> list[int]:
        """Patches of each image, host integers."""
        return patch_counts(self.grid_hws)

    @property
    def num_patches(self) -> int:
        return sum(self.seqlens)

    @property
    def rope_freqs_cis(self) -> Tensor:
        """(L, head_dim/2) complex64 factors: the engines' form, a view of `rope_cos_sin`."""
        return torch.view_as_complex(self.rope_cos_sin)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "EncoderMetadata":
        """The same metadata with its tensors on `device`."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {
            name: value.to(device, non_blocking=non_blocking)
            for name, value in tensors.items()
            if isinstance(value, Tensor)
        }
        return replace(self, **moved)


def prepare_encoder_metadata(
    grid_hws: Sequence[Grid] | Tensor,
    *,
    pos_emb: Learnable2DInterpPosEmb,
    rope: Rope2DPosEmb,
    merge_kernel_size: tuple[int, int],
    max_images: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    position: str = "interpolate",
) -> EncoderMetadata:
    """Builds the metadata of one packed batch; the only builder there is.

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
    token_counts(grids, merge_kernel_size)
    slots = len(grids) if max_images is None else max_images
    if len(grids) > slots:
        raise ValueError(f"{len(grids)} images do not fit max_images={slots}")
    device = pos_emb.weight.device if device is None else torch.device(device)
    dtype = pos_emb.weight.dtype if dtype is None else dtype

    arrays = pack_grid_arrays(grids, slots, merge_kernel_size).to(device)
    return EncoderMetadata(
        grid_hws=tuple(grids),
        pos_embeds=upload(pos_emb.get_pos_embeds(grids, dtype, position), device),
        rope_cos_sin=rope.gather_cos_sin(arrays["positions"], grids, compute_dtype(dtype)),
        cu_seqlens=arrays["cu_seqlens"],
        max_seqlen=max(patch_counts(grids), default=0),
        merge_gather_idx=arrays["merge_gather_idx"],
    )
