"""The encoder as nine stages: the FLOPs and bytes of each by formula, and the time of each as measured.

    work = stage_work(config, [1472, 1232], itemsize=2)     # stage -> Work(flops, moved)
    times = time_stages(encoder, pixel_values, grid_hws)    # .stages, .whole, .flops_per_s, .bytes_per_s

Notebook 00 uses it: the learner writes some of the formulas, this module holds the rest. Bytes follow one rule: every
linear map reads its input and its weights and writes its output, once; attention reads q, k, v and writes its result,
without the scores; residual additions and biases are left out. Only matrix products count as FLOPs.
Example: one image of 100 patches at D = 288, N = 6 costs 4 * 6 * 100^2 * 288 = 69,120,000 FLOPs in attention.
Test: tests/test_lessons.py.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import KimiVLConfig
from ..geometry import MERGE_KERNEL_SIZE, PATCH_SIZE
from ..kernels.packed_linear import fused_linear
from ..kernels.rotation import rotate_complex
from ..kimi_vl.encoder import KimiVLEncoder
from ..measure.roofline import copy_gbps, matmul
from ..measure.timing import Timing, time_interleaved
from ..moonvit.attention import resolve_attention
from ..moonvit.layers import MoonVitEncoderLayer
from ..moonvit.merger import patch_merger_packed

NUMBERS_A_PATCH = 3 * PATCH_SIZE * PATCH_SIZE
PATCHES_A_TOKEN = MERGE_KERNEL_SIZE[0] * MERGE_KERNEL_SIZE[1]
PARTS = {
    "MLP": ("MLP",),
    "QKV and output": ("QKV and output",),
    "patch embed, projector": ("patch embed", "projector"),
    "attention": ("attention",),
}


class Work(NamedTuple):
    """FLOPs of the matrix products of a stage, and the fewest bytes that it reads and writes."""

    flops: int
    moved: int

    @property
    def intensity(self) -> float:
        """FLOPs for each byte moved."""
        return self.flops / self.moved

    def seconds(self, flops_per_s: float, bytes_per_s: float) -> float:
        """The roofline: the time of the arithmetic or of the bytes, whichever is longer."""
        return max(self.flops / flops_per_s, self.moved / bytes_per_s)


def stage_work(config: KimiVLConfig, lengths: Sequence[int], itemsize: int) -> dict[str, Work]:
    """Stage -> its work in one forward, all blocks together, in the order of the forward.

    Args:
        config: the model.
        lengths: patches of each image of the batch.
        itemsize: bytes of one number: 2 in bfloat16, 4 in float32.
    """
    vision, text_width = config.vision_config, config.text_config.hidden_size
    width, inner, blocks = vision.hidden_size, vision.intermediate_size, vision.num_hidden_layers
    table = vision.init_pos_emb_height * vision.init_pos_emb_width * width
    patches = sum(lengths)
    tokens, merged = patches // PATCHES_A_TOKEN, PATCHES_A_TOKEN * width
    hidden = patches * width  # numbers of one (L, D) tensor
    flops_and_numbers = {
        "position": (0, len(lengths) * table + hidden),
        "patch embed": (
            2 * patches * NUMBERS_A_PATCH * width,
            patches * NUMBERS_A_PATCH + NUMBERS_A_PATCH * width + 2 * hidden,
        ),
        "norms": (0, (2 * blocks + 1) * 2 * hidden),
        "QKV and output": (2 * blocks * patches * 4 * width**2, blocks * (6 * hidden + 4 * width**2)),
        "rope": (0, blocks * 4 * hidden),
        "attention": (4 * blocks * width * sum(n * n for n in lengths), blocks * 4 * hidden),
        "MLP": (
            2 * blocks * patches * 2 * width * inner,
            blocks * (2 * hidden + 2 * patches * inner + 2 * width * inner),
        ),
        "merge": (0, 2 * hidden),
        "projector": (
            2 * tokens * (merged**2 + merged * text_width),
            tokens * (3 * merged + text_width) + merged**2 + merged * text_width,
        ),
    }
    return {stage: Work(flops, itemsize * numbers) for stage, (flops, numbers) in flops_and_numbers.items()}


def flops_shares(config: KimiVLConfig, sizes: Sequence[int]) -> dict[str, list[float]]:
    """Part -> its share of the FLOPs (0 to 1) for one image of each number of patches in `sizes`."""
    each = [{stage: work.flops for stage, work in stage_work(config, [n], 1).items()} for n in sizes]
    return {
        part: [sum(one[stage] for stage in stages) / sum(one.values()) for one in each]
        for part, stages in PARTS.items()
    }


class StageTimes(NamedTuple):
    """Measured times: each stage with all its blocks, the whole forward, and what the machine can do."""

    stages: dict[str, Timing]
    whole: Timing
    flops_per_s: float  # of a large matrix product
    bytes_per_s: float  # of a large copy

    @property
    def shares(self) -> dict[str, float]:
        """Stage -> its share of the sum of all stages."""
        total = sum(timing.p50_ms for timing in self.stages.values())
        return {stage: timing.p50_ms / total for stage, timing in self.stages.items()}


def time_stages(
    encoder: KimiVLEncoder, pixel_values: Tensor, grid_hws: Tensor, *, repeats: int = 7, product: int = 1536
) -> StageTimes:
    """Times each stage alone on the tensors of a real forward, in random order with the whole forward.

    A stage that runs once in each block is timed in the last block and multiplied by the number of blocks. The speed of
    arithmetic is that of a product of two (product, product) matrices, timed in the same rounds.
    """
    stages = _stages(encoder, pixel_values, grid_hws)
    device, dtype = encoder.vision_tower.device, encoder.vision_tower.dtype
    variants: dict[str, Callable[[], object]] = {stage: run for stage, (_, run) in stages.items()}
    variants |= {"": matmul(dtype, device, product), "whole": lambda: encoder(pixel_values, grid_hws)}
    timed = time_interleaved(variants, device=device, warmup=1, repeats=repeats)
    return StageTimes(
        {stage: _times(timed[stage], count) for stage, (count, _) in stages.items()},
        timed["whole"],
        2 * product**3 / timed[""].p50_ms * 1e3,
        copy_gbps(device, mib=64) * 1e9,
    )


def _stages(
    encoder: KimiVLEncoder, pixel_values: Tensor, grid_hws: Tensor
) -> Mapping[str, tuple[int, Callable[[], object]]]:
    """Stage -> (how often a forward runs it, one run on the last block's tensors)."""
    tower, projector = encoder.vision_tower, encoder.multi_modal_projector
    attend = resolve_attention("auto")
    metadata = tower.prepare_encoder_metadata(grid_hws)
    pos_emb, count = tower.patch_embed.pos_emb, len(tower.encoder.blocks)
    block = tower.encoder.blocks[count - 1]
    assert isinstance(block, MoonVitEncoderLayer)
    linear = tower.resolve_options().linear  # the products of the forward: of packed weights on a CPU
    with torch.no_grad():
        encoder(pixel_values, grid_hws)  # packs the weights
        x = tower.patch_embed(pixel_values, metadata.pos_embeds)  # (L, D)
        qkv = block.wqkv(block.norm0(x)).unflatten(-1, (3, block.num_heads, -1))  # (L, 3, heads, d)
        q, k = rotate_complex(qkv[:, :2], metadata.rope_cos_sin).unbind(1)  # (L, heads, d) each
        merged = patch_merger_packed(x, metadata.merge_gather_idx)  # (T, 4, D)
    return {
        "position": (1, lambda: pos_emb.get_pos_embeds(metadata.grid_hws)),
        "patch embed": (1, lambda: tower.patch_embed(pixel_values, metadata.pos_embeds)),
        "norms": (2 * count + 1, lambda: block.norm0(x)),
        "QKV and output": (count, lambda: (fused_linear(block.wqkv, x, linear), fused_linear(block.wo, x, linear))),
        "rope": (count, lambda: rotate_complex(qkv[:, :2], metadata.rope_cos_sin)),
        "attention": (count, lambda: attend(q, k, qkv[:, 2], metadata)),
        "MLP": (count, lambda: block.mlp(x, kernel=linear)),
        "merge": (1, lambda: patch_merger_packed(x, metadata.merge_gather_idx)),
        "projector": (1, lambda: projector(merged)),
    }


def _times(one: Timing, count: int) -> Timing:
    return Timing(count * one.p20_ms, count * one.p50_ms, count * one.p80_ms, one.repeats)
