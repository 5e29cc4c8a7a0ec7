"""The forward as engines ran it before they built its metadata on the host: with the grids on the device.

    "per_layer"     position, rope and merger each read the grids back; each layer reads the length of the longest image
    "per_forward"   the same three reads; the length is read once
    "host"          the tower as it is now: grids are host integers, and nothing is read

Weights, operators and values are the same. Only the reads differ, so that they can be counted and timed.

Source: MoonViT in SGLang before ("per_layer") and after ("per_forward") its pull request 30869. vLLM's eager path in
release 0.32 has the grids on the host, and each layer reads the length.
Test: tests/test_tower_syncs.py. Record: ladder__*.csv.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..geometry import as_grid_list
from ..kernels.dispatch import compute_dtype
from ..kernels.memory import upload
from ..moonvit.attention import PackedAttention
from ..moonvit.layers import ResolvedOptions
from ..moonvit.merger import patch_merger
from ..moonvit.metadata import EncoderMetadata
from ..moonvit.model import MoonVitPretrainedModel

Forward = Callable[[MoonVitPretrainedModel, Tensor, Tensor], Tensor]


def reading_the_bound(attend: PackedAttention) -> PackedAttention:
    """`attend` after a read of the longest image's length from the device: the host waits in every layer."""

    def run(q: Tensor, k: Tensor, v: Tensor, metadata: EncoderMetadata) -> Tensor:
        bound = int(metadata.cu_seqlens.diff().max())
        return attend(q, k, v, replace(metadata, max_seqlen=bound))

    return run


def encode_per_layer(tower: MoonVitPretrainedModel, pixel_values: Tensor, grid_hws: Tensor) -> Tensor:
    """(L, 3, 14, 14) and (n, 2) grids on the tower's device -> (T, 4, D)."""
    kernels = ResolvedOptions.resolve(tower.options, tower.device, tower.dtype)
    in_every_layer = replace(kernels, attend=reading_the_bound(kernels.attend))
    return _encode(tower, pixel_values, grid_hws, in_every_layer, len(pixel_values))  # a bound that each layer replaces


def encode_per_forward(tower: MoonVitPretrainedModel, pixel_values: Tensor, grid_hws: Tensor) -> Tensor:
    """(L, 3, 14, 14) and (n, 2) grids on the tower's device -> (T, 4, D)."""
    kernels = ResolvedOptions.resolve(tower.options, tower.device, tower.dtype)
    return _encode(tower, pixel_values, grid_hws, kernels, int(_offsets(grid_hws).diff().max()))


def encode_host(tower: MoonVitPretrainedModel, pixel_values: Tensor, grid_hws: Tensor) -> Tensor:
    """(L, 3, 14, 14) and (n, 2) grids on the host -> (T, 4, D)."""
    return tower(pixel_values, grid_hws)


METADATA_VARIANTS: dict[str, Forward] = {
    "per_layer": encode_per_layer,
    "per_forward": encode_per_forward,
    "host": encode_host,
}


def _encode(
    tower: MoonVitPretrainedModel, pixel_values: Tensor, grid_hws: Tensor, kernels: ResolvedOptions, max_seqlen: int
) -> Tensor:
    pos_emb, position = tower.patch_embed.pos_emb, tower.options.position
    grids = as_grid_list(grid_hws.tolist())
    pos_embeds = pos_emb(grids, tower.dtype, position)  # (L, D)
    cos_sin = tower.rope_2d.get_cos_sin(as_grid_list(grid_hws.tolist()), tower.device, compute_dtype(tower.dtype))
    metadata = EncoderMetadata(
        grid_hws=tuple(grids),
        pos_embeds=pos_embeds,
        rope_cos_sin=cos_sin,
        cu_seqlens=_offsets(grid_hws),
        max_seqlen=max_seqlen,
        merge_gather_idx=torch.empty(0, dtype=torch.int64, device="cpu"),  # merged image by image
    )
    x = tower.patch_embed(upload(pixel_values, tower.device), pos_embeds)  # (L, D)
    x = tower.encoder(x, metadata, kernels)  # (L, D)
    return torch.cat(patch_merger(x, as_grid_list(grid_hws.tolist()), tower.config.merge_kernel_size))  # (T, 4, D)


def _offsets(grid_hws: Tensor) -> Tensor:
    return F.pad(grid_hws.prod(1).cumsum(0, dtype=torch.int32), (1, 0))  # (n + 1,)
