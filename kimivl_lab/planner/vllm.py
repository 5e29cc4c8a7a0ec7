"""How vLLM uses budgets: the tokens that its graphs compute, its defaults, and the flag that sets budgets.

To capture a budget of B merged tokens for b images, vLLM lays out b equal grids that hold B together: ceil(B / b)
tokens each, in rows no wider than its rotary table. So a graph may compute more than its budget. As read in release
0.32, `EncoderCudaGraphManager` and `KimiVLForConditionalGeneration`.

Test: tests/test_budgets.py.
"""

import json
from collections.abc import Sequence

from ..gpus import Gpu

LEAST_BUDGET = 64  # merged tokens of an image of 224 x 224
MAX_BATCHED_TOKENS = 8192  # the scheduler's default on an H100, which is also the largest default budget
READ_IN = "vLLM 0.32"
WIDEST_ROW = 256  # merged tokens: half of the 512 patches that the rotary table is wide


def default_batched_tokens(gpu: Gpu) -> int:
    """`--max-num-batched-tokens` of `vllm serve` on this GPU where it is not given.

    16,384 from 160 GiB on (B200), 8,192 from 70 GiB on except on an A100 (H100, H200), else 2,048 (A100, L40S).
    """
    gib = gpu.memory_bytes / 2**30
    if gib >= 160:
        return 16384
    return 8192 if gib >= 70 and "A100" not in gpu.name else 2048


def vllm_rows(budget: int, max_images: int) -> int:
    """Merged tokens that vLLM's graph of this budget computes, at least `budget`.

    b * h * w with w = min(ceil(B / b), 256) and h = ceil(ceil(B / b) / w): a budget of 1,089 for 1 image computes
    5 * 256 = 1,280. The result, taken as a budget, computes itself.
    """
    per_image = -(-budget // max_images)
    width = min(per_image, WIDEST_ROW)
    return max_images * -(-per_image // width) * width


def powers_of_two(least: int = LEAST_BUDGET, most: int = MAX_BATCHED_TOKENS) -> list[int]:
    """vLLM's default budgets: least * 2^k, and `most`. ValueError unless 1 <= least <= most.

    From 64 to 800: 64, 128, 256, 512, 800.
    """
    if not 1 <= least <= most:
        raise ValueError(f"least {least} and most {most}: 1 <= least <= most is needed")
    budgets = [least]
    while budgets[-1] * 2 <= most:
        budgets.append(budgets[-1] * 2)
    return budgets if budgets[-1] == most else [*budgets, most]


def default_max_images(budgets: Sequence[int]) -> int:
    """vLLM's default for most images in one replay: largest over smallest budget, at most the smallest budget."""
    return min(budgets[-1] // budgets[0], budgets[0])


def vllm_flag(budgets: Sequence[int], max_images: int) -> str:
    """The arguments of `vllm serve` that capture these budgets, to paste into a shell.

    Raises:
        ValueError: a repeated budget (vLLM would capture it twice); `max_images` above the smallest budget (vLLM would
            refuse it).
    """
    if len(set(budgets)) != len(budgets):
        raise ValueError(f"budgets must differ, got {list(budgets)}")
    if not 1 <= max_images <= min(budgets):
        raise ValueError(f"max_images must be 1 to the smallest budget, {min(budgets)}, got {max_images}")
    config = {
        "cudagraph_mm_encoder": True,
        "encoder_cudagraph_token_budgets": sorted(budgets),
        "encoder_cudagraph_max_vision_items_per_batch": max_images,
    }
    return f"--compilation-config '{json.dumps(config)}'"
