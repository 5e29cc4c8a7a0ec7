"""Finds the budgets with the least predicted time: exact for one image in a call, a search for several.

Time is counted in rows: the tokens that replays compute, and a price for each replay (`replay_cost.py`).

With one image in a call, each image is a replay alone, and the best budgets are a staircase over the images' tokens
(`staircase.py`). With several, two steps take turns: pack the calls into the present budgets, then find the best
staircase over the totals of those replays. With exact packing neither step can take more time, so the turns end.
After that, each budget is tried at other totals, and a move that takes less time is kept. The search runs twice, from
the best budgets for single images and from the best budgets for whole calls, because each can end in another minimum.
vLLM's own budgets are compared with both results.

Test: tests/test_budgets.py.
"""

from collections.abc import Callable
from itertools import combinations
from typing import TypeAlias

import numpy as np

from .inputs import PlanInputs
from .staircase import best_steps
from .vllm import powers_of_two

Budgets: TypeAlias = tuple[int, ...]

SEEN_CALLS = 256  # drawn for the search, for each number of images in a call
_MOVES = 48  # totals at which each budget is tried
_PASSES = 4  # over all budgets; most searches end after two
_TIE = 1.005  # results within 0.5 %, less than the drawn calls can tell apart, tie


def search_budgets(
    inputs: PlanInputs, graphs: int, on_progress: Callable[[float], object] = lambda share: None
) -> Budgets:
    """At most `graphs` budgets, ascending. The largest holds the largest image that any budget can hold.

    Args:
        on_progress: called with the share of the work that is done, 0 to 1.

    Raises:
        ValueError: the limit of memory allows no budget that holds an image.
    """
    single = best_for_totals(inputs, inputs.workload.tokens, inputs.workload.counts, graphs)
    if inputs.images_per_call == (1,):
        return single
    search = _Search(inputs, graphs)
    whole_calls = best_for_totals(inputs, *search.totals_of_calls(), graphs)
    found = [single, whole_calls, *search.own_budgets()]
    for begun, start in ((0.0, single), (0.5, whole_calls)):
        found.append(search.improve(start, lambda share, begun=begun: on_progress(begun + share / 2)))
    on_progress(1.0)
    found = [search.without_unused(budgets) for budgets in found]
    close = [budgets for budgets in found if search.cost(budgets) <= _TIE * min(map(search.cost, found))]
    return min(close, key=search.rank)


def times_by_graphs(inputs: PlanInputs, budgets: Budgets, most: int) -> dict[int, float]:
    """Predicted time / real rows for at most 1, 2, .. `most` graphs: what one graph more would buy.

    Exact for one image in a call. For several, budgets are taken from `budgets` or added to them one by one, each time
    the one that leaves the least time: a search that is less thorough than the plan's.
    """
    search = _Search(inputs, most)
    if inputs.images_per_call == (1,):
        counts = inputs.workload.tokens, inputs.workload.counts
        ladders = [best_for_totals(inputs, *counts, number) for number in range(1, most + 1)]
    else:
        ladders, fewer, more = [budgets], budgets, budgets
        while smaller := [
            one for one in combinations(fewer, len(fewer) - 1) if one and one[-1] >= inputs.largest_image
        ]:
            ladders.append(fewer := min(smaller, key=search.cost))
        while len(more) < most and (larger := search.with_one_moved(more, len(more))):
            ladders.append(more := min(larger, key=search.cost))
    cost = search.cost
    return {
        number: min(map(cost, few))
        for number in range(1, most + 1)
        if (few := [one for one in ladders if len(one) <= number])
    }


def best_for_totals(inputs: PlanInputs, tokens: np.ndarray, weights: np.ndarray, graphs: int) -> Budgets:
    """The best budgets, exact, where each total is one replay. A total that no budget holds is left out.

    Args:
        tokens: (m,) merged tokens of each replay.
        weights: (m,) how often it occurs.
    """
    weight_of: dict[int, float] = {}  # by the smallest budget that holds the total
    # The largest image has weight 0 here: it must fit, also where no replay in `tokens` is as large.
    for total, weight in [*zip(tokens.tolist(), weights.tolist(), strict=True), (inputs.largest_image, 0.0)]:
        if (budget := inputs.budget_for(total)) is not None:
            weight_of[budget] = weight_of.get(budget, 0.0) + weight
    budgets = sorted(weight_of)
    steps = best_steps([weight_of[budget] for budget in budgets], budgets, graphs)
    return tuple(budgets[step] for step in steps)


class _Search:
    """Drawn calls, and steps that lower the cost of budgets on these calls."""

    def __init__(self, inputs: PlanInputs, graphs: int) -> None:
        self.inputs, self.graphs = inputs, graphs
        self.calls = [inputs.calls(images, SEEN_CALLS, "seen") for images in inputs.images_per_call]
        runs = np.concatenate([_totals_of_runs(calls.tokens) for calls in self.calls])
        totals = np.quantile(runs[runs > 0], np.linspace(0, 1, _MOVES), method="nearest")
        budgets = {inputs.budget_for(total) for total in totals.tolist()}
        self.moves = sorted(budget for budget in budgets if budget is not None)
        self._costs: dict[Budgets, float] = {}

    def totals_of_calls(self) -> tuple[np.ndarray, np.ndarray]:
        """(m,) merged tokens of each whole call, and (m,) its weight."""
        weights = [calls.weights / calls.real_rows for calls in self.calls]
        return np.concatenate([calls.tokens.sum(axis=1) for calls in self.calls]), np.concatenate(weights)

    def replays_in(self, budgets: Budgets) -> tuple[np.ndarray, np.ndarray]:
        """(m,) merged tokens of each replay of the calls, and (m,) its weight."""
        replays = [self.inputs.pack(calls, budgets) for calls in self.calls]
        weights = [packed.weights / calls.real_rows for packed, calls in zip(replays, self.calls, strict=True)]
        return np.concatenate([packed.tokens for packed in replays]), np.concatenate(weights)

    def cost(self, budgets: Budgets) -> float:
        """Predicted time in rows / real rows, the mean over the numbers of images in a call."""
        if budgets not in self._costs:
            costs = []
            for calls in self.calls:
                replays = self.inputs.pack(calls, budgets)
                costs.append(replays.weights @ self.inputs.cost(replays, budgets) / calls.real_rows)
            self._costs[budgets] = float(np.mean(costs))
        return self._costs[budgets]

    def rank(self, budgets: Budgets) -> tuple[float, float, float]:
        """What decides a tie: fewer replays (to a tenth of a replay a call), then less memory, then less time."""
        counts = [self.inputs.pack(calls, budgets).weights.sum() / calls.weights.sum() for calls in self.calls]
        memory = self.inputs.engine.memory(budgets, self.inputs.max_images)
        return round(float(np.mean(counts)), 1), memory, self.cost(budgets)

    def own_budgets(self) -> list[Budgets]:
        """vLLM's own budgets that are used, each as large as its graph computes; none where they are too many."""
        inputs = self.inputs
        rounded = {inputs.budget_for(budget) for budget in powers_of_two(most=inputs.default_largest)}
        own = tuple(sorted(budget for budget in rounded if budget is not None))
        if not own or own[-1] < inputs.largest_image:
            return []
        used = self.without_unused(own)
        return [used] if len(used) <= self.graphs else []

    def without_unused(self, budgets: Budgets) -> Budgets:
        """The budgets that some drawn call is replayed in, and the largest.

        Without a budget a greedy rule may cut the calls in another way, which may leave another one unused.
        """
        used = {step for calls in self.calls for step in self.inputs.pack(calls, budgets).steps.tolist()}
        kept = tuple(budget for step, budget in enumerate(budgets) if step in used or budget == budgets[-1])
        return kept if kept == budgets else self.without_unused(kept)

    def improve(self, budgets: Budgets, on_progress: Callable[[float], object]) -> Budgets:
        """Alternates and moves until neither lowers the cost, or all passes are done."""
        budgets = self._alternate(budgets)
        for number in range(_PASSES):
            before = budgets
            positions = min(self.graphs, len(self.moves))  # more budgets than totals to move to would repeat some
            for position in range(positions):
                budgets = min([budgets, *self.with_one_moved(budgets, position)], key=self.cost)
                on_progress((number * positions + position + 1) / (_PASSES * positions))
            budgets = self._alternate(budgets)
            if budgets == before:
                break
        return budgets

    def _alternate(self, budgets: Budgets) -> Budgets:
        """Packs into the budgets, and fits the budgets to the packing, until the cost falls no more."""
        while True:
            better = best_for_totals(self.inputs, *self.replays_in(budgets), self.graphs)
            if self.cost(better) >= self.cost(budgets):
                return budgets
            budgets = better

    def with_one_moved(self, budgets: Budgets, position: int) -> list[Budgets]:
        """The budgets with the one at `position` at other totals; past the end, with one budget more."""
        others = budgets[:position] + budgets[position + 1 :]
        moved = (tuple(sorted({*others, budget})) for budget in self.moves if budget not in others)
        return [one for one in moved if one[-1] >= self.inputs.largest_image]


def _totals_of_runs(tokens: np.ndarray) -> np.ndarray:
    """Totals of all runs of neighbours in (C, n) sorted calls. A replay holds such a run.

    One call of 2, 3, 7 tokens gives 2, 3, 7, 5, 10, 12.
    """
    offsets = np.concatenate((np.zeros((len(tokens), 1), dtype=np.int64), tokens.cumsum(axis=1)), axis=1)
    count = offsets.shape[1]
    return np.concatenate([(offsets[:, length:] - offsets[:, : count - length]).ravel() for length in range(1, count)])
