"""What benchmarks start from: a float32 reference and a tower of the same weights, drawn grids, random numbers."""

import argparse
import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from ..config import EncoderOptions, MoonViTConfig
from ..datasets import draw_sizes
from ..geometry import IN_TOKEN_LIMIT, Grid, GridLike, image_geometry, patch_counts
from ..moonvit.model import MoonVitPretrainedModel

REFERENCE = EncoderOptions(attention="sdpa", position="interpolate", rope="complex", linear="plain")


def reference_and_tower(
    options: argparse.Namespace, fast: EncoderOptions | None = None
) -> tuple[MoonVitPretrainedModel, MoonVitPretrainedModel]:
    """The float32 reference and the tower that is timed, in the options' dtype, on the options' device.

    Both hold the same random weights: speed does not depend on them.

    Args:
        fast: how the tower computes; None: the default options.
    """
    torch.manual_seed(options.seed)
    exact = MoonVitPretrainedModel(MoonViTConfig.preset(options.preset), REFERENCE).eval()
    tower = copy.deepcopy(exact)  # random numbers for 400 million weights take seconds
    tower.options = fast or EncoderOptions()
    return exact.to(options.device), tower.to(device=options.device, dtype=getattr(torch, options.dtype))


def drawn_grids(workload: str, count: int, seed: int, in_token_limit: int = IN_TOKEN_LIMIT) -> list[Grid]:
    """The grids of `count` images drawn from a workload."""
    sizes = draw_sizes(workload, count, seed)
    return [image_geometry(*size, in_token_limit=in_token_limit).grid_hw for size in sizes]


def random_qkv(options: argparse.Namespace, grids: Sequence[GridLike]) -> Tensor:
    """(L, 3, 16, 72): q, k and v of the published heads, in the options' dtype on their device."""
    config, generator = MoonViTConfig.preset("kimi-vl-a3b"), torch.Generator().manual_seed(options.seed)
    size = sum(patch_counts(grids)), 3, config.num_attention_heads, config.head_dim
    return torch.randn(size, generator=generator, device="cpu").to(getattr(torch, options.dtype)).to(options.device)


def noise(grids: Sequence[GridLike], seed: int) -> Tensor:
    """(L, 3, 14, 14) float32 pixels of unit variance, on the host."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(patch_counts(grids)), 3, 14, 14, generator=generator, device="cpu")
