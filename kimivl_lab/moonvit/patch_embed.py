"""Patches -> vectors: a 14x14 convolution of stride 14, computed as a linear map of the 588 numbers of a patch.

The parameter keeps the name and shape of the convolution, [D, 3, 14, 14], so the published weights load unchanged.

uint8 patches: the processor's normalisation x = (u/255 - 0.5) / 0.5 becomes part of the map. With v = u - 128, which
bfloat16 holds exactly for every u, x = (2 v + 1) / 255, so W x + b = (2/255 W) v + (b + sum(W) / 255).

Test: tests/test_tower.py, tests/test_faults_weights.py. Record: ladder__*.csv (convolution against product).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import MoonViTConfig
from ..kernels.dispatch import compute_dtype, is_untouched
from .position import Learnable2DInterpPosEmb

_UINT8_SCALE = 2 / 255
_UINT8_SHIFT = 1 / 255


class MoonVisionPatchEmbed(nn.Module):
    """`proj` (patch embedding) and `pos_emb` (position table)."""

    def __init__(self, config: MoonViTConfig) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, config.hidden_size, kernel_size=config.patch_size, stride=config.patch_size)
        self.pos_emb = Learnable2DInterpPosEmb(
            config.init_pos_emb_height, config.init_pos_emb_width, config.hidden_size
        )

    def forward(self, pixel_values: Tensor, pos_embeds: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """(L, 3, 14, 14) patches and (L, D) position embeddings -> (L, D) in the embeddings' dtype.

        Args:
            dtype: of the product; None: the weights'.
        """
        return (self.project(pixel_values, dtype) + pos_embeds).to(pos_embeds.dtype)

    def project(self, pixel_values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """(L, 3, 14, 14) normalised patches, or uint8 patches with the image's own values -> (L, D).

        A `proj` with hooks, an adapter or another class is called with normalised patches, as a convolution is.
        """
        raw = pixel_values.dtype == torch.uint8
        if not is_untouched(self.proj, nn.Conv2d):
            own = self.pos_emb.weight.dtype
            if raw:
                pixel_values = (pixel_values.to(compute_dtype(own)) - 128) * _UINT8_SCALE + _UINT8_SHIFT
            return self.proj(pixel_values.to(own)).flatten(1)
        patches = pixel_values.flatten(1)  # (L, 588)
        weight, bias = self.proj.weight.flatten(1), self.proj.bias
        assert bias is not None
        if dtype is not None:
            if not raw:
                patches = patches.to(weight.dtype)  # a graph's input has this dtype: the values stay the same
            weight, bias = weight.to(dtype), bias.to(dtype)
        if raw:
            precise = weight.to(compute_dtype(weight.dtype))
            bias = (bias + precise.sum(1) * _UINT8_SHIFT).to(weight.dtype)
            weight = (precise * _UINT8_SCALE).to(weight.dtype)
            patches = patches.to(weight.dtype) - 128
        return F.linear(patches.to(weight.dtype), weight, bias)
