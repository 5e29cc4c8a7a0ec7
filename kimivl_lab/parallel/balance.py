"""Which rank encodes which image: by patches, as the engines do, or by cost, which counts attention as quadratic.

Both are plain functions of host integers, so every rank computes the same assignment without a message. Images are
placed largest first, each on the rank with the least load so far. By patches, one image of 16,384 balances four of
4,096. But its attention costs four times as much as theirs, so the other ranks wait for its rank.

Test: tests/test_balance.py. Record: parallel__*.csv.
"""

from bisect import bisect, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import fsum, inf
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # the planner balances too, and works without torch
    from ..config import MoonViTConfig

_CLOSE_ENOUGH = 1e-3  # a straggler this near to the lower bound is left as it is


class Assignment(NamedTuple):
    """Images to ranks.

    Attributes:
        order: the images' indices, those of rank 0 first, then those of rank 1, and so on.
        counts: images of each rank; 0 is allowed.
        loads: summed size or cost of each rank.
    """

    order: list[int]
    counts: list[int]
    loads: list[float]

    @property
    def by_rank(self) -> list[list[int]]:
        """The images of each rank."""
        return [self.order[start:end] for start, end in pairwise(accumulate(self.counts, initial=0))]


@dataclass(frozen=True)
class QuadraticCost:
    """cost(n) = per_patch * n + per_pair * n^2 + per_image, of one image of n patches, in any one unit."""

    per_patch: float
    per_pair: float
    per_image: float = 0.0

    @classmethod
    def of_flops(cls, config: "MoonViTConfig") -> "QuadraticCost":
        """In FLOPs of the tower: what to balance by where nothing has been measured."""
        from ..moonvit.flops import tower_flops

        one = tower_flops(config, [(1, 1)])
        return cls(per_patch=one["patch_embed"] + one["linear"], per_pair=one["attention"])

    def __call__(self, patches: int) -> float:
        return self.per_patch * patches + self.per_pair * patches * patches + self.per_image


def get_dp_encoder_lb_assignment(sizes: Sequence[int], num_ranks: int) -> Assignment:
    """The engines' balance: largest image first, to the rank with the fewest patches, ties to the lowest rank.

    Args:
        sizes: patches of each image.

    Raises:
        ValueError: fewer than one rank, or a size that is not positive.

    Source: SGLang's function of this name. [1000, 100, 200, 50] on 2 ranks: order [0, 2, 1, 3], counts [1, 3], loads
    [1000, 350].
    """
    _check(sizes, num_ranks)
    return _assignment(_largest_first(sizes, num_ranks), sizes)


def round_robin_assignment(sizes: Sequence[int], num_ranks: int) -> Assignment:
    """No balance at all, for comparison: image i to rank i modulo `num_ranks`; loads in patches.

    Args:
        sizes: patches of each image.

    Raises:
        ValueError: fewer than one rank, or a size that is not positive.
    """
    _check(sizes, num_ranks)
    return _assignment([list(range(rank, len(sizes), num_ranks)) for rank in range(num_ranks)], sizes)


def balance_by_cost(sizes: Sequence[int], num_ranks: int, cost: Callable[[int], float]) -> Assignment:
    """Largest first by cost, then the slowest rank gives an image away or swaps one, while that makes it faster.

    Never slower, by `cost`, than the engines' balance. Each rank's images come largest first, so that equal ones lie
    side by side. The same on every rank: ties go to the lowest rank and the first image.

    Args:
        sizes: patches of each image.
        cost: of one image by its patches, positive: `QuadraticCost`, `CostModel.image_cost` or another.

    Returns:
        The assignment; its loads are in the unit of `cost`.

    Raises:
        ValueError: fewer than one rank, a size or a cost that is not positive.
    """
    _check(sizes, num_ranks)
    costs = _costs(sizes, cost)
    ranks = _largest_first(costs, num_ranks)
    _relieve_slowest(ranks, costs, lower_bound(costs, num_ranks))
    ours = _assignment(ranks, costs, fsum)
    theirs = _assignment(_largest_first(sizes, num_ranks), costs, fsum)
    return ours if max(ours.loads) <= max(theirs.loads) else theirs


def lower_bound(costs: Sequence[float], num_ranks: int) -> float:
    """A load that the slowest rank cannot be below, whatever the assignment; 0 of no images.

    The mean load, or the largest image, or, as of any k * num_ranks + 1 images some rank has k + 1: the k + 1 smallest
    of the k * num_ranks + 1 largest.
    """
    largest_first = sorted(costs, reverse=True)
    sums = list(accumulate(largest_first, initial=0.0))
    crowded = (sums[last] - sums[last - k - 1] for k, last in enumerate(range(1, len(sums), num_ranks)))
    return max(sums[-1] / num_ranks, max(crowded, default=0.0))


def _check(sizes: Sequence[int], num_ranks: int) -> None:
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
    if min(sizes, default=1) < 1:
        raise ValueError(f"sizes are patches of images, each at least 1, got {min(sizes)}")


def _costs(sizes: Sequence[int], cost: Callable[[int], float]) -> list[float]:
    by_size = {size: float(cost(size)) for size in set(sizes)}
    for size, value in by_size.items():
        if not 0 < value < inf:
            raise ValueError(f"the cost of an image of {size} patches must be positive and finite, got {value}")
    return [by_size[size] for size in sizes]


def _assignment(
    ranks: list[list[int]], weights: Sequence[float], add: Callable[[Iterable[float]], float] = sum
) -> Assignment:
    """`add`: `fsum`, which does not depend on the order, of costs; `sum` of patches, which stay whole numbers."""
    loads = [add(weights[image] for image in rank) for rank in ranks]
    return Assignment([image for rank in ranks for image in rank], [len(rank) for rank in ranks], loads)


def _largest_first(weights: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Images of each rank; equal weights in the order of the input."""
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    for image in sorted(range(len(weights)), key=lambda image: -weights[image]):
        lightest = loads.index(min(loads))
        ranks[lightest].append(image)
        loads[lightest] += weights[image]
    return ranks


def _relieve_slowest(ranks: list[list[int]], costs: Sequence[float], bound: float) -> None:
    """Moves and swaps, in place, until none helps the slowest rank or it is close to `bound`."""

    def weight_then_last(image: int) -> tuple[float, int]:
        return costs[image], -image

    for rank in ranks:
        rank.sort(key=weight_then_last)
    loads = [fsum(costs[image] for image in rank) for rank in ranks]
    while (slowest := max(loads)) > bound * (1 + _CLOSE_ENOUGH):
        straggler = loads.index(slowest)
        best, step = slowest * 1e-9, None
        for other, theirs in enumerate(ranks):
            gap = slowest - loads[other]
            weights = [0.0, *(costs[image] for image in theirs)]  # the first: nothing comes back
            for image in ranks[straggler] if gap > 2 * best else ():
                near = bisect(weights, costs[image] - gap / 2)  # a shift of half the gap would be the best
                for back in range(max(near - 1, 0), min(near + 1, len(weights))):
                    shift = costs[image] - weights[back]
                    if min(shift, gap - shift) > best:
                        best, step = min(shift, gap - shift), (image, other, theirs[back - 1] if back else None)
        if step is None:
            break
        image, other, returned = step
        for source, target, moved in ((straggler, other, image), (other, straggler, returned)):
            if moved is not None:
                ranks[source].remove(moved)
                insort(ranks[target], moved, key=weight_then_last)
        for rank in (straggler, other):
            loads[rank] = fsum(costs[image] for image in ranks[rank])
    for rank in ranks:
        rank.reverse()
