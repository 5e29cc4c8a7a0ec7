"""Many calls packed at once, for planning: the packers of `packing` over arrays, and the same replays."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Traffic:
    """Calls of one size.

    Attributes:
        tokens: (C, n) int64, merged tokens of the n images of each call, ascending in each row.
        weights: (C,) float64, how often each call comes.
    """

    tokens: np.ndarray
    weights: np.ndarray

    @property
    def real_rows(self) -> float:
        """Merged tokens in all calls."""
        return float(self.weights @ self.tokens.sum(axis=1))


@dataclass(frozen=True)
class Replays:
    """The R replays of all calls, in no particular order.

    Attributes:
        tokens: (R,) int64, real merged tokens of each.
        weights: (R,) float64, of its call.
        steps: (R,) int64, position of its budget; the number of budgets where it is eager.
    """

    tokens: np.ndarray
    weights: np.ndarray
    steps: np.ndarray


def pack_traffic(
    calls: Traffic, budgets: Sequence[int], max_images: int, packing: str, prices: Sequence[float]
) -> Replays:
    """Packs every call as `PACKERS[packing]` does.

    Args:
        budgets: merged tokens, ascending, each once.
        prices: (len(budgets),) of one replay of each, by which "exact" chooses.
    """
    ladder = np.asarray(budgets, dtype=np.int64)
    if packing == "exact":
        return _exact(calls, ladder, max_images, np.asarray(prices, dtype=float))
    return _greedy(calls, ladder, max_images, deferred=packing == "next_fit_deferred")


def _exact(calls: Traffic, ladder: np.ndarray, max_images: int, prices: np.ndarray) -> Replays:
    count, images = calls.tokens.shape
    cheapest = np.arange(len(ladder) + 1)  # by the smallest budget that holds a run: the one to take
    for step in range(len(ladder) - 2, -1, -1):
        if prices[cheapest[step + 1]] < prices[step]:
            cheapest[step] = cheapest[step + 1]
    one_replay = 1e-9 * prices.max()  # breaks ties towards fewer replays
    price = np.append(prices[cheapest[:-1]] + one_replay, np.inf)
    offsets = np.concatenate((np.zeros((count, 1), dtype=np.int64), calls.tokens.cumsum(axis=1)), axis=1)
    best = np.zeros((count, images + 1))
    cuts = np.zeros((count, images + 1), dtype=np.int64)  # by end: where the last run begins
    rows = np.arange(count)
    for end in range(1, images + 1):
        starts = np.arange(end - 1, max(end - max_images, 0) - 1, -1)
        step = np.searchsorted(ladder, offsets[:, end : end + 1] - offsets[:, starts])
        options = best[:, starts] + price[step]  # (C, starts)
        eager = step[:, 0] == len(ladder)
        options[eager, 0] = best[eager, end - 1]
        pick = options.argmin(axis=1)
        best[:, end] = options[rows, pick]
        cuts[:, end] = starts[pick]
    tokens, weights = [], []
    end = np.full(count, images)
    while len(rows):
        start = cuts[rows, end]
        tokens.append(offsets[rows, end] - offsets[rows, start])
        weights.append(calls.weights[rows])
        rows, end = rows[start > 0], start[start > 0]
    held = np.concatenate(tokens)
    return Replays(held, np.concatenate(weights), cheapest[np.searchsorted(ladder, held)])


def _greedy(calls: Traffic, ladder: np.ndarray, max_images: int, deferred: bool) -> Replays:
    padded = np.append(ladder, np.iinfo(np.int64).max // 4)

    def fitting(tokens: np.ndarray) -> np.ndarray:
        return padded[np.searchsorted(ladder, tokens)]

    held = calls.tokens[:, 0].copy()
    images = np.ones_like(held)
    tokens, weights = [], []
    for image in calls.tokens.T[1:]:
        merged = held + image
        closes = (images == max_images) | (merged > ladder[-1])
        if deferred:
            of_run, alone = fitting(held), fitting(image)
            closes |= (of_run + alone < fitting(merged)) & (alone >= of_run)
        tokens.append(held[closes])
        weights.append(calls.weights[closes])
        held = np.where(closes, image, merged)
        images = np.where(closes, 1, images + 1)
    all_held = np.concatenate([*tokens, held])
    return Replays(all_held, np.concatenate([*weights, calls.weights]), np.searchsorted(ladder, all_held))
