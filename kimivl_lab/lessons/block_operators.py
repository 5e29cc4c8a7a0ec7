"""The nine operators of one block: their FLOPs and bytes by formula, their times, and the machine's speeds.

    work = block_work(config, [1472, 1320], itemsize=4)        # operator -> (FLOPs, bytes)
    times = time_block(config, grids)                          # .operators, .gflops, .gbps

Notebook 40 uses it. Bytes follow one rule: each operator reads its inputs and weights and writes its result, once.
Example: attention over one image of n patches does 4 n^2 D FLOPs and moves 4 n D numbers: n FLOPs a number.
Test: tests/test_lessons_attention.py.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..config import EncoderOptions, MoonViTConfig
from ..geometry import GridLike, patch_counts
from ..measure.roofline import copy_gbps, matmul_peak_tflops
from ..measure.timing import Timing, time_interleaved
from ..moonvit.layers import MoonVitEncoderLayer, ResolvedOptions
from ..moonvit.model import MoonVitPretrainedModel

_COMPUTED = {"norm": 8, "rope": 3, "gelu": 9}  # FLOPs counted for one number


class BlockTimes(NamedTuple):
    """Operator -> its time, and the speeds of this machine: a large matrix product and a large copy."""

    operators: dict[str, Timing]
    gflops: float
    gbps: float


def block_work(config: MoonViTConfig, lengths: Sequence[int], itemsize: int) -> dict[str, tuple[int, int]]:
    """Operator -> (FLOPs, bytes) in one block, in the order of the forward, for images of `lengths` patches."""
    width, inner, patches = config.hidden_size, config.intermediate_size, sum(lengths)
    numbers = patches * width  # of one (L, D) tensor

    def product(features_in: int, features_out: int) -> tuple[int, int]:
        moved = patches * (features_in + features_out) + features_in * features_out
        return 2 * patches * features_in * features_out, itemsize * moved

    return {
        "norms": (2 * _COMPUTED["norm"] * numbers, itemsize * 4 * numbers),
        "wqkv": product(width, 3 * width),
        "rope": (_COMPUTED["rope"] * 2 * numbers, itemsize * 4 * numbers + 4 * patches * config.head_dim),
        "attention": (4 * width * sum(n * n for n in lengths), itemsize * 4 * numbers),
        "wo": product(width, width),
        "fc0": product(width, inner),
        "gelu": (_COMPUTED["gelu"] * patches * inner, itemsize * 2 * patches * inner),
        "fc1": product(inner, width),
        "residuals": (2 * numbers, itemsize * 6 * numbers),
    }


def time_block(
    config: MoonViTConfig,
    grid_hws: Sequence[GridLike],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    repeats: int = 7,
    product: int = 1024,
) -> BlockTimes:
    """Times each operator of one block alone, as the plain implementation runs it, in random order.

    The machine's speeds are measured before and after, and the better counts. `product` is the side of the matrices.
    """

    def speeds() -> tuple[float, float]:
        return 1e3 * matmul_peak_tflops(dtype, device, product), copy_gbps(device, mib=64)

    with torch.no_grad():
        operators = _operators(config, grid_hws, torch.device(device), dtype)
        before = speeds()
        timed = time_interleaved(operators, device=device, warmup=2, repeats=repeats)
        gflops, gbps = map(max, before, speeds())
    return BlockTimes(timed, gflops, gbps)


def _operators(
    config: MoonViTConfig, grid_hws: Sequence[GridLike], device: torch.device, dtype: torch.dtype
) -> dict[str, Callable[[], object]]:
    torch.manual_seed(0)
    options = EncoderOptions(linear="plain")
    tower = MoonVitPretrainedModel(config, options).eval().to(device, dtype)
    block, metadata = tower.encoder.blocks[0], tower.prepare_encoder_metadata(grid_hws)
    assert isinstance(block, MoonVitEncoderLayer)
    plain = ResolvedOptions.resolve(options, device, dtype)
    x = torch.randn(sum(patch_counts(grid_hws)), config.hidden_size).to(device, dtype)  # (L, D)
    qkv = block.wqkv(x).unflatten(-1, (3, block.num_heads, -1))  # (L, 3, heads, d)
    hidden = block.mlp.fc0(x)  # (L, F)
    return {
        "norms": lambda: (block.norm0(x), block.norm1(x)),
        "wqkv": lambda: block.wqkv(x),
        "rope": lambda: plain.rotate(qkv[:, :2], metadata.rope_cos_sin),
        "attention": lambda: plain.attend(*qkv.unbind(1), metadata),
        "wo": lambda: block.wo(x),
        "fc0": lambda: block.mlp.fc0(x),
        "gelu": lambda: F.gelu(hidden, approximate="tanh"),
        "fc1": lambda: block.mlp.fc1(hidden),
        "residuals": lambda: (x + x, x + x),
    }
