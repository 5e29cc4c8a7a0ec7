"""Packed attention in notebook 40: the four matrices of a mask, the programs of a launch, and patches left out.

    mask_matrices([2, 3])                     # scores, mask, masked scores and weights, (5, 5) each
    mean_waste("coco_val2017", [1, 8])        # [0.0, 0.87]: scores that a mask throws away
    programs([0, 5, 7], max_seqlen=5, tile=4) # [(0, 4), (4, 5), (5, 7)]: the queries of each program that has work
    lost_patches(attend, q, k, v, [5, 2], 5)  # [0, 0]: patches of each image that `attend` did not compute

Test: tests/test_lessons_attention.py.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
from torch import Tensor

from ..datasets import draw_sizes
from ..geometry import image_geometry
from ..kernels.packed_attention import sdpa_runs

Varlen = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


def mask_matrices(lengths: Sequence[int], seed: int = 0) -> dict[str, Tensor]:
    """Words -> (L, L): random scores, the mask (1: same image), the scores that it lets through, and their softmax."""
    image = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))  # (L,)
    scores = torch.randn(len(image), len(image), generator=torch.Generator().manual_seed(seed))
    mask = image[:, None] == image[None, :]
    masked = scores.masked_fill(~mask, -torch.inf)
    return {
        "1  scores": scores,
        "2  mask: same image?": mask.float(),
        "3  masked scores": masked,
        "4  weights: softmax": masked.softmax(-1),
    }


def mask_waste(lengths: Sequence[int]) -> float:
    """Share (0 to 1) of the scores that a mask throws away, for images of `lengths` patches: [2, 3] gives 0.48."""
    return 1 - sum(n * n for n in lengths) / sum(lengths) ** 2


def mean_waste(workload: str, counts: Sequence[int], batches: int = 40) -> list[float]:
    """Mean share (0 to 1) of the scores that a mask throws away, over random batches of each number of images."""
    patches = [image_geometry(*size).patches for size in draw_sizes(workload, batches * max(counts), seed=1)]
    return [
        sum(mask_waste(patches[first : first + count]) for first in range(0, batches * count, count)) / batches
        for count in counts
    ]


def programs(cu_seqlens: Sequence[int], max_seqlen: int, tile: int) -> list[tuple[int, int]]:
    """(first query, query after the last) of each program with work, in the order of images and tiles.

    A launch has ceil(max_seqlen / tile) programs for each image. One whose tile begins behind its image has no work.
    """
    return [
        (first, min(first + tile, end))
        for start, end in pairwise(cu_seqlens)
        for first in range(start, min(end, start + -(-max_seqlen // tile) * tile), tile)
    ]


def lost_patches(attend: Varlen, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], max_seqlen: int) -> list[int]:
    """Patches of each image whose result is not attention, when `attend` runs with this bound.

    `attend` takes q, k, v (L, heads, d), int32 offsets and the bound. Each result is compared with the library's own
    loop; a relative error of 5 % or more, or NaN, is a lost patch. Memory of the result's size is filled with NaN and
    freed before the call, so that a kernel which does not write a patch does not find an older, right result there.
    """
    want = sdpa_runs(q, k, v, lengths).flatten(1).float()
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=q.device)
    unwritten = torch.full_like(q, torch.nan)
    del unwritten
    got = attend(q, k, v, offsets, max_seqlen).flatten(1).float()
    right = (got - want).norm(dim=1) < 0.05 * want.norm(dim=1)
    return [int((~part).sum()) for part in right.split(list(lengths))]


def memory_curves(
    patches: Sequence[int], itemsize: int, head_size: int = 72, image: int = 1024
) -> dict[str, list[float]]:
    """Words -> MiB beyond q, k and v of one head, for batches of `patches`: masks, a loop, and offsets."""
    curves = {
        f"mask in two matrices: {1 + itemsize} $L^2$": [(1 + itemsize) * n * n for n in patches],
        "mask, one byte a pair: $L^2$": [n * n for n in patches],
        "results of the loop, twice": [2 * itemsize * head_size * n for n in patches],
        "offsets": [4 * (n // image + 1) for n in patches],
    }
    return {words: [count / 2**20 for count in values] for words, values in curves.items()}


def packing_result(lengths: Sequence[int], answer: Any) -> tuple[int, bool] | None:
    """Runs of equal lengths after packing in the order of `answer`, and whether its way back restores the order.

    Args:
        answer: (order, back), two lists of image numbers; None or ... gives None.
    """
    if answer is None or answer is ...:
        return None
    order, back = (torch.as_tensor(numbers).tolist() for numbers in answer)
    packed = [lengths[number] for number in order]
    restored = sorted(order) == list(range(len(lengths))) and [order[at] for at in back] == list(range(len(lengths)))
    return sum(1 for _ in groupby(packed)), restored


def pieces_cases() -> list[tuple[tuple[Tensor, list[Tensor], list[Tensor]], Tensor]]:
    """(q, pieces of k, pieces of v) and attention at once, with scores near 1 and then near 100; 4, 4 and 3 keys."""
    generator, cases = torch.Generator().manual_seed(2), []
    for scale in (1.0, 40.0):
        q, k, v = (torch.randn(lines, 8, generator=generator) for lines in (5, 11, 11))
        at_once = (scale * q @ k.T / 8**0.5).softmax(-1) @ v
        cases.append(((scale * q, list(k.split(4)), list(v.split(4))), at_once))
    return cases
