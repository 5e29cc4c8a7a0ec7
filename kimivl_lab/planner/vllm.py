"""What vLLM makes of budgets: rows, defaults, the flag.

To capture a budget of B merged tokens for b images, it lays out b equal grids that hold B between them: ceil(B / b)
tokens each, in rows no wider than its rotary table. So a graph may compute more than its budget. As read in release
0.32, `EncoderCudaGraphManager` and `KimiVLForConditionalGeneration`.
"""

import json
from collections.abc import Sequence

LEAST_BUDGET = 64  # merged tokens of a 224 x 224 picture
MAX_BATCHED_TOKENS = 8192  # the scheduler's default, and with it the largest budget
WIDEST_ROW = 256  # merged tokens: half of the 512 patches that the rotary table is wide


def vllm_rows(budget: int, max_images: int) -> int:
    """Merged tokens that a graph of this budget computes: b * h * w with w = min(ceil(B / b), 256), never under B.

    A budget equal to its own rows wastes nothing, and `vllm_rows` of any number is such a budget.
    """
    per_image = -(-budget // max_images)
    width = min(per_image, WIDEST_ROW)
    return max_images * -(-per_image // width) * width


def powers_of_two(least: int = LEAST_BUDGET, most: int = MAX_BATCHED_TOKENS) -> list[int]:
    """The budgets that vLLM takes by itself: least * 2^k, and `most` on top. ValueError unless 1 <= least <= most."""
    if not 1 <= least <= most:
        raise ValueError(f"least {least} and most {most}: 1 <= least <= most is needed")
    budgets = [least]
    while budgets[-1] * 2 <= most:
        budgets.append(budgets[-1] * 2)
    return budgets if budgets[-1] == most else [*budgets, most]


def default_max_images(budgets: Sequence[int]) -> int:
    """The images in one replay that vLLM takes by itself: largest over smallest budget, at most the smallest."""
    return min(budgets[-1] // budgets[0], budgets[0])


def vllm_flag(budgets: Sequence[int], max_images: int) -> str:
    """The arguments of `vllm serve` that capture these budgets, to be pasted into a shell.

    Raises:
        ValueError: a budget twice (vLLM would capture it twice), or `max_images` above the smallest (it would refuse).
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
