"""What benchmarks of whole towers start from: a float32 reference, a tower of the same weights, and pixels of noise."""

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor

from ..config import EncoderOptions, MoonViTConfig
from ..geometry import GridLike, patch_counts
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
    tower = MoonVitPretrainedModel(exact.config, fast).eval()
    tower.load_state_dict(exact.state_dict())
    return exact.to(options.device), tower.to(device=options.device, dtype=getattr(torch, options.dtype))


def noise(grids: Sequence[GridLike], seed: int) -> Tensor:
    """(L, 3, 14, 14) float32 pixels of unit variance, on the host."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(patch_counts(grids)), 3, 14, 14, generator=generator, device="cpu")
