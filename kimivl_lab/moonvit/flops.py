"""Counts the floating-point operations of the tower by formula. A multiply-add counts as two.

A patch costs 2 N (4 D^2 + 2 D F) in the linear layers of N blocks (0.822 GFLOP at full size) and 4 n D N in attention,
n the patches of its image; the patch embedding adds 2 * 588 D. Norms, softmax, rope and merging are left out.

Test: tests/test_cost_model.py.
"""

from collections.abc import Sequence

from ..config import MoonViTConfig
from ..geometry import GridLike, patch_counts


def tower_flops(config: MoonViTConfig, grid_hws: Sequence[GridLike]) -> dict[str, int]:
    """FLOPs of one forward over all `grid_hws`: "patch_embed", "linear", "attention"."""
    lengths = patch_counts(grid_hws)
    layers, dim, hidden = config.num_hidden_layers, config.hidden_size, config.intermediate_size
    return {
        "patch_embed": 2 * config.patch_dim * dim * sum(lengths),
        "linear": 2 * layers * (4 * dim * dim + 2 * dim * hidden) * sum(lengths),
        "attention": 4 * layers * dim * sum(n * n for n in lengths),
    }


def pair_rows(config: MoonViTConfig) -> float:
    """FLOPs of one attention pair of patches over those of one row, a merged token without its attention.

    1/26,600 at full size: attention of an image of 4,096 patches is 631 rows beside the 1,024 of its tokens.
    """
    flops = tower_flops(config, [config.merge_kernel_size])  # one row: merge_size patches, and their square in pairs
    return flops["attention"] / config.merge_size**2 / (flops["patch_embed"] + flops["linear"])
