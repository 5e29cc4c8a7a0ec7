"""Packs the images of one call into replays of captured graphs.

A graph of budget B always computes B merged tokens, and it takes at most `max_images` images. Every packer sorts the
images by tokens and cuts that order into runs. One run is one replay, in the smallest budget that holds the run. An
image that is larger than every budget runs eager, alone. Images of 90, 100 and 1,000 tokens and budgets 256, 1024 and
2048 give:

    next_fit            one replay of 2048     fills a run up to the LARGEST budget; vLLM before 0.32
    next_fit_deferred   replays of 256, 1024   closes a run early where two budgets are smaller than one; vLLM 0.32
    exact               replays of 256, 1024   the cut with the least rows + replays * price; of equal cuts the one with
                                               fewer replays

Time has two parts: rows, and the fixed time of every replay. `replay_cost` is the price of a replay, the rows that the
device could compute in that fixed time. With a price of 800 rows the exact packer merges the call above into one replay
of 2048, because 256 + 1024 + 2 * 800 is more than 2048 + 800. Where the price comes from: `planner/replay_cost.py`. The
greedy rules are an engine's and know no price.

`pack` packs one call and is the reference. `pack_many` packs many calls of one size at once, over arrays, for the
planner; `test_many_calls_at_once_are_packed_as_one_by_one` compares the two. This module imports no torch, because the
planner works without it. The greedy rules were read in `EncoderCudaGraphManager` of vLLM 0.32.

Test: tests/test_packing.py.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..checks import as_not_negative, as_positive


@dataclass(frozen=True)
class Replay:
    """One call of a graph, or of the eager tower where `budget` is None."""

    images: tuple[int, ...]  # indices into the call's list, fewest tokens first
    tokens: int  # real merged tokens
    budget: int | None  # None: eager

    @property
    def rows(self) -> int:
        """Merged tokens that are computed: the budget, or the real tokens of an eager call."""
        return self.tokens if self.budget is None else self.budget


def pack(
    tokens: Sequence[int], budgets: Iterable[int], max_images: int, packing: str = "exact", replay_cost: int = 0
) -> list[Replay]:
    """Packs one call by the rule called `packing`.

    Example: `pack([10, 10, 10, 10], [10, 20, 40], 8)` is one replay of 40.

    Args:
        tokens: merged tokens of each image, 1 or more.
        budgets: merged tokens of the captured graphs, in any order; repeats count once.
        max_images: most images in one replay.
        packing: a key of `PACKERS`.
        replay_cost: the price of one replay in rows, 0 or more; only "exact" uses it.

    Raises:
        ValueError: an unknown rule; no budgets; tokens, a budget or `max_images` that is not a positive integer; a
            `replay_cost` that is not an integer of 0 or more.
    """
    if packing not in PACKERS:
        raise ValueError(f"unknown packing {packing!r}: one of {', '.join(PACKERS)}")
    price = as_not_negative("replay_cost", replay_cost)
    return PACKERS[packing](tokens, budgets, max_images, **({"replay_cost": price} if packing == "exact" else {}))


def pack_greedily(tokens: Sequence[int], budgets: Iterable[int], max_images: int, *, deferred: bool) -> list[Replay]:
    """Fills each run up to the LARGEST budget, then replays it in the smallest that holds it.

    With `deferred`, and B(x) the smallest budget that holds x tokens, the next image begins a new run also if

        B(run) + B(image) < B(run + image)    and    B(image) >= B(run)
    """
    tokens, ladder, order, eager = _prepare(tokens, budgets, max_images)

    def smallest(held: int) -> int:
        return ladder[bisect_left(ladder, held)]

    runs: list[tuple[list[int], int]] = []  # (images, tokens)
    for image in order:
        run, held = runs[-1] if runs else ([], 0)
        alone, total = tokens[image], held + tokens[image]
        closes = not run or len(run) == max_images or total > ladder[-1]
        if deferred and not closes:
            closes = smallest(held) + smallest(alone) < smallest(total) and smallest(alone) >= smallest(held)
        if closes:
            runs.append(([image], alone))
        else:
            runs[-1] = ([*run, image], total)
    return [Replay(tuple(run), held, smallest(held)) for run, held in runs] + eager


def pack_exact(tokens: Sequence[int], budgets: Iterable[int], max_images: int, replay_cost: int = 0) -> list[Replay]:
    """The cut of the sorted images with the least rows + replays * replay_cost; of equal cuts, the fewest replays.

    Dynamic programming over where the last run begins, O(n * max_images):

        best[end] = min over start of best[start] + (B(tokens of start..end-1) + replay_cost, 1)

    in pairs (cost, replays). The result never costs more than a greedy rule's. Groups of images that are not neighbours
    in the sorted order are not tried, though some cost less.
    """
    tokens, ladder, order, eager = _prepare(tokens, budgets, max_images)
    best = [(0, 0)]  # by number of images: (cost, replays) of the first so many
    cuts: list[tuple[int, int, int]] = []  # by end - 1: where the last run begins, its tokens, its budget
    for end in range(1, len(order) + 1):
        options, held = [], 0
        for start in range(end - 1, max(end - max_images, 0) - 1, -1):
            held += tokens[order[start]]
            if held > ladder[-1]:
                break
            budget = ladder[bisect_left(ladder, held)]
            cost, replays = best[start]
            options.append(((cost + budget + replay_cost, replays + 1), (start, held, budget)))
        least, cut = min(options, key=lambda option: option[0])
        best.append(least)
        cuts.append(cut)
    runs, end = [], len(order)
    while end:
        start, held, budget = cuts[end - 1]
        runs.append(Replay(tuple(order[start:end]), held, budget))
        end = start
    return runs[::-1] + eager


PACKERS: dict[str, Callable[..., list[Replay]]] = {  # each takes (tokens, budgets, max_images)
    "next_fit": partial(pack_greedily, deferred=False),
    "next_fit_deferred": partial(pack_greedily, deferred=True),
    "exact": pack_exact,
}


def as_budgets(budgets: Iterable[int]) -> list[int]:
    """Budgets ascending, each once. ValueError for none at all, or one that is not a positive integer."""
    ladder = sorted({as_positive("a budget", budget) for budget in budgets})
    if not ladder:
        raise ValueError("budgets are empty: give at least one, in merged tokens")
    return ladder


def _prepare(
    tokens: Sequence[int], budgets: Iterable[int], max_images: int
) -> tuple[list[int], list[int], list[int], list[Replay]]:
    """Checked: tokens; budgets ascending; the images that fit one, by tokens; the eager replays of the others."""
    counts, ladder = [as_positive("tokens of an image", count) for count in tokens], as_budgets(budgets)
    as_positive("max_images", max_images)
    order = sorted(range(len(counts)), key=counts.__getitem__)
    fitting = [image for image in order if counts[image] <= ladder[-1]]
    return counts, ladder, fitting, [Replay((image,), counts[image], None) for image in order[len(fitting) :]]


# --- many calls at once ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Traffic:
    """C calls of n images each.

    Attributes:
        tokens: (C, n) int64, merged tokens of each image, ascending in each call; a call of fewer than n images
            begins with zeros, which are no images.
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
        steps: (R,) int64, position of its budget; the number of budgets where the replay is eager.
    """

    tokens: np.ndarray
    weights: np.ndarray
    steps: np.ndarray


def pack_many(
    calls: Traffic, budgets: Sequence[int], max_images: int, packing: str = "exact", replay_cost: int = 0
) -> Replays:
    """Packs every call as `pack` does.

    Args:
        budgets: merged tokens, ascending, each once.
        max_images, packing, replay_cost: as of `pack`.
    """
    ladder = np.asarray(budgets, dtype=np.int64)
    if packing == "exact":
        return _pack_many_exactly(calls, ladder, max_images, replay_cost)
    return _pack_many_greedily(calls, ladder, max_images, deferred=packing == "next_fit_deferred")


def _pack_many_exactly(calls: Traffic, ladder: np.ndarray, max_images: int, replay_cost: int) -> Replays:
    count, images = calls.tokens.shape
    # One integer orders (cost, replays): a call has at most `images` replays, so one row outweighs all of them.
    price = np.append((ladder + replay_cost) * (images + 1) + 1, np.iinfo(np.int64).max // 4)
    offsets = np.concatenate((np.zeros((count, 1), dtype=np.int64), calls.tokens.cumsum(axis=1)), axis=1)
    best = np.zeros((count, images + 1), dtype=np.int64)
    cuts = np.zeros((count, images + 1), dtype=np.int64)  # by end: where the last run begins
    rows = np.arange(count)
    for end in range(1, images + 1):
        starts = np.arange(end - 1, max(end - max_images, 0) - 1, -1)
        step = np.searchsorted(ladder, offsets[:, end : end + 1] - offsets[:, starts])
        options = best[:, starts] + price[step]  # (C, starts)
        alone = (step[:, 0] == len(ladder)) | (offsets[:, end] == 0)  # eager, or no image
        options[alone, 0] = best[alone, end - 1]
        pick = options.argmin(axis=1)
        best[:, end] = options[rows, pick]
        cuts[:, end] = starts[pick]
    tokens, weights = [], []
    end = np.full(count, images)
    while len(rows):
        start = cuts[rows, end]
        tokens.append(offsets[rows, end] - offsets[rows, start])
        weights.append(calls.weights[rows])
        left = offsets[rows, start] > 0  # images, not only the zeros before them
        rows, end = rows[left], start[left]
    held = np.concatenate(tokens)
    return Replays(held, np.concatenate(weights), np.searchsorted(ladder, held))


def _pack_many_greedily(calls: Traffic, ladder: np.ndarray, max_images: int, deferred: bool) -> Replays:
    padded = np.append(ladder, np.iinfo(np.int64).max // 4)

    def fitting(tokens: np.ndarray) -> np.ndarray:
        return padded[np.searchsorted(ladder, tokens)]

    held = calls.tokens[:, 0].copy()
    images = (held > 0).astype(np.int64)
    tokens, weights = [], []
    for image in calls.tokens.T[1:]:
        merged = held + image
        closes = (images == max_images) | (merged > ladder[-1])
        if deferred:
            of_run, alone = fitting(held), fitting(image)
            closes |= (of_run + alone < fitting(merged)) & (alone >= of_run)
        closes &= held > 0
        tokens.append(held[closes])
        weights.append(calls.weights[closes])
        held = np.where(closes, image, merged)
        images = np.where(closes, 1, images + (image > 0))
    all_held = np.concatenate([*tokens, held])
    return Replays(all_held, np.concatenate([*weights, calls.weights]), np.searchsorted(ladder, all_held))
