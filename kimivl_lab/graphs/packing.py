"""Images of one call -> replays of captured graphs: two greedy rules and the exact optimum, behind one signature.

A graph of budget B computes B merged tokens whatever it is given, and takes at most `max_images` images. Every packer
sorts the images by tokens and cuts that order into runs; one run is one replay, in a budget that holds it. An image
larger than every budget runs eager, alone. The greedy rules are vLLM's, read in `EncoderCudaGraphManager` of 0.32.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ..checks import as_positive

Cost: TypeAlias = Callable[[int], float] | Mapping[int, float]


@dataclass(frozen=True)
class Replay:
    """One call of a graph, or of the eager tower where `budget` is None."""

    images: tuple[int, ...]  # indices into the call's list, fewest tokens first
    tokens: int  # real merged tokens
    budget: int | None  # None: eager, fits no budget

    @property
    def rows(self) -> int:
        """Merged tokens computed: the budget; eager, what is there."""
        return self.tokens if self.budget is None else self.budget


def pack_next_fit(
    tokens: Sequence[int], budgets: Iterable[int], max_images: int, cost: Cost | None = None
) -> list[Replay]:
    """Fills each run up to the LARGEST budget, then replays it in the smallest that holds it: vLLM before 0.32.

    Args:
        tokens: merged tokens of each image, 1 or more.
        budgets: merged tokens of the captured graphs, in any order; repeats count once.
        max_images: most images in one replay.
        cost: checked, but the rule looks at no cost.

    Raises:
        ValueError: no budgets; tokens, a budget or `max_images` that is not a positive integer; a cost that is missing,
            negative or not finite.
    """
    return _pack_greedily(tokens, budgets, max_images, cost, lambda run, image, ladder: False)


def pack_next_fit_deferred(
    tokens: Sequence[int], budgets: Iterable[int], max_images: int, cost: Cost | None = None
) -> list[Replay]:
    """Next-fit that closes a run early where that lowers the budgets' sum: vLLM 0.32.

    With B(x) the smallest budget that holds x tokens, the next image begins a run of its own if

        B(run) + B(image) < B(run + image)    and    B(image) >= B(run)

    Arguments and errors are those of `pack_next_fit`.
    """

    def defers(run: int, image: int, ladder: Sequence[int]) -> bool:
        of_run, alone, merged = (ladder[bisect_left(ladder, held)] for held in (run, image, run + image))
        return of_run + alone < merged and alone >= of_run

    return _pack_greedily(tokens, budgets, max_images, cost, defers)


def pack_exact(
    tokens: Sequence[int], budgets: Iterable[int], max_images: int, cost: Cost | None = None
) -> list[Replay]:
    """The cheapest cut of the sorted images into runs, by dynamic programming over where the last run begins:

        best[end] = min over start of best[start] + price(tokens of start..end-1)

    with price(x) that of the cheapest budget which holds x. O(n * max_images). Exact over every cut of the sorted
    order, whatever the cost, hence never dearer than a greedy rule; groups of images that are not neighbours in that
    order are not tried, though some are cheaper. Of equally cheap cuts the one with the fewest replays is taken.

    Args:
        tokens, budgets, max_images: as of `pack_next_fit`.
        cost: of one replay by budget, a function or a mapping, 0 or more; measured milliseconds, say. Default: the
            budget itself, the rows that are computed.

    Raises:
        ValueError: as `pack_next_fit`.
    """
    tokens, ladder, order, eager = _prepare(tokens, budgets, max_images)
    cheapest = _cheapest(ladder, cost)
    best = [(0.0, 0)]  # (cost, replays) of the first images, by their number
    cuts: list[tuple[int, int, int]] = []  # by end - 1: where the last run begins, its tokens, its budget
    for end in range(1, len(order) + 1):
        least, cut, held = (math.inf, 0), (0, 0, 0), 0
        for start in range(end - 1, max(end - max_images, 0) - 1, -1):
            held += tokens[order[start]]
            if held > ladder[-1]:
                break
            price, budget = cheapest[bisect_left(ladder, held)]
            candidate = (best[start][0] + price, best[start][1] + 1)
            if candidate < least:
                least, cut = candidate, (start, held, budget)
        best.append(least)
        cuts.append(cut)
    replays, end = [], len(order)
    while end:
        start, held, budget = cuts[end - 1]
        replays.append(Replay(tuple(order[start:end]), held, budget))
        end = start
    return replays[::-1] + eager


PACKERS = {"next_fit": pack_next_fit, "next_fit_deferred": pack_next_fit_deferred, "exact": pack_exact}


def as_budgets(budgets: Iterable[int]) -> list[int]:
    """Budgets ascending, each once. ValueError for none at all, or one that is not a positive integer."""
    ladder = sorted({as_positive("a budget", budget) for budget in budgets})
    if not ladder:
        raise ValueError("budgets are empty: give at least one, in merged tokens")
    return ladder


def _pack_greedily(
    tokens: Sequence[int],
    budgets: Iterable[int],
    max_images: int,
    cost: Cost | None,
    defers: Callable[[int, int, Sequence[int]], bool],
) -> list[Replay]:
    tokens, ladder, order, eager = _prepare(tokens, budgets, max_images)
    _cheapest(ladder, cost)
    replays: list[Replay] = []
    run: list[int] = []
    held = 0

    def close() -> None:
        if run:
            replays.append(Replay(tuple(run), held, ladder[bisect_left(ladder, held)]))

    for image in order:
        fits = len(run) < max_images and held + tokens[image] <= ladder[-1]
        if run and (not fits or defers(held, tokens[image], ladder)):
            close()
            run, held = [], 0
        run.append(image)
        held += tokens[image]
    close()
    return replays + eager


def _prepare(
    tokens: Sequence[int], budgets: Iterable[int], max_images: int
) -> tuple[list[int], list[int], list[int], list[Replay]]:
    """Checked: tokens; budgets ascending; the images that fit one, by tokens; the eager replays of the others."""
    counts, ladder = [as_positive("tokens of an image", count) for count in tokens], as_budgets(budgets)
    as_positive("max_images", max_images)
    order = sorted(range(len(counts)), key=counts.__getitem__)
    fitting = [image for image in order if counts[image] <= ladder[-1]]
    return counts, ladder, fitting, [Replay((image,), counts[image], None) for image in order[len(fitting) :]]


def _cheapest(ladder: Sequence[int], cost: Cost | None) -> list[tuple[float, int]]:
    """(cost, budget) of the cheapest budget at or above each one; of equals the smallest."""
    cheapest: list[tuple[float, int]] = []
    for budget in reversed(ladder):
        try:
            price = float(budget if cost is None else cost[budget] if isinstance(cost, Mapping) else cost(budget))
        except KeyError:
            raise ValueError(f"no cost is given for budget {budget}") from None
        if not 0 <= price < math.inf:
            raise ValueError(f"the cost of budget {budget} must be 0 or more and finite, got {price}")
        cheapest.append(min([(price, budget), *cheapest[-1:]]))
    return cheapest[::-1]
