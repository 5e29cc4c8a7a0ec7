"""Finds the budgets that compute the fewest tokens: exact for one image in a call, a search for several.

With one image in a call, each image is a replay alone, and the best budgets are a staircase over the images' tokens
(`staircase.py`). With several, two steps take turns: pack the calls into the present budgets, then find the best
staircase over the totals of those replays. With exact packing neither step can compute more tokens, so the turns end.
After that, each budget is tried at other totals, and a move that computes fewer tokens is kept. The search runs twice,
from the best budgets for single images and from the best budgets for whole calls, because each can end in another
minimum.

Test: tests/test_budgets.py.
"""

from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np

from .inputs import PlanInputs
from .staircase import best_steps

Budgets: TypeAlias = tuple[int, ...]

SEEN_CALLS = 256  # drawn for the search, for each number of images in a call
_MOVES = 48  # totals at which each budget is tried
_PASSES = 4  # over all budgets; most searches end after two
_TIE = 1.005  # of results within 0.5 %, less than the drawn calls can tell apart, the one with least memory is taken


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
    found = [single, whole_calls]
    for begun, start in ((0.0, single), (0.5, whole_calls)):
        found.append(search.improve(start, lambda share, begun=begun: on_progress(begun + share / 2)))
    on_progress(1.0)
    close = [budgets for budgets in found if search.cost(budgets) <= _TIE * min(map(search.cost, found))]
    lightest = min(close, key=lambda one: (inputs.engine.memory(one, inputs.max_images), search.cost(one)))
    return search.without_unused(lightest)


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
        totals = np.quantile(runs, np.linspace(0, 1, _MOVES), method="nearest")
        budgets = {inputs.budget_for(total) for total in totals.tolist()}
        self.moves = sorted(budget for budget in budgets if budget is not None)
        self._costs: dict[Budgets, float] = {}

    def totals_of_calls(self) -> tuple[np.ndarray, np.ndarray]:
        """(m,) merged tokens of each whole call, and (m,) its weight."""
        weights = [calls.weights / calls.real_rows for calls in self.calls]
        return np.concatenate([calls.tokens.sum(axis=1) for calls in self.calls]), np.concatenate(weights)

    def cost(self, budgets: Budgets) -> float:
        """Tokens computed by graphs / real tokens, the mean over the numbers of images in a call.

        Eager replays are not counted: the images above the limit of memory are the same for all budgets.
        """
        if budgets not in self._costs:
            rows = np.array([*map(self.inputs.rows, budgets), 0])
            costs = []
            for calls in self.calls:
                replays = self.inputs.pack(calls, budgets)
                costs.append(replays.weights @ rows[replays.steps] / calls.real_rows)
            self._costs[budgets] = float(np.mean(costs))
        return self._costs[budgets]

    def without_unused(self, budgets: Budgets) -> Budgets:
        """The budgets that some drawn call is replayed in, and the largest."""
        used = {step for calls in self.calls for step in self.inputs.pack(calls, budgets).steps.tolist()}
        return tuple(budget for step, budget in enumerate(budgets) if step in used or budget == budgets[-1])

    def improve(self, budgets: Budgets, on_progress: Callable[[float], object]) -> Budgets:
        """Alternates and moves until neither lowers the cost, or all passes are done."""
        budgets = self._alternate(budgets)
        for number in range(_PASSES):
            before = budgets
            positions = min(self.graphs, len(self.moves))  # more budgets than totals to move to would repeat some
            for position in range(positions):
                budgets = min([budgets, *self._with_one_moved(budgets, position)], key=self.cost)
                on_progress((number * positions + position + 1) / (_PASSES * positions))
            budgets = self._alternate(budgets)
            if budgets == before:
                break
        return budgets

    def _alternate(self, budgets: Budgets) -> Budgets:
        """Packs into the budgets, and fits the budgets to the packing, until the cost falls no more."""
        while True:
            replays = [self.inputs.pack(calls, budgets) for calls in self.calls]
            weights = [packed.weights / calls.real_rows for packed, calls in zip(replays, self.calls, strict=True)]
            totals = np.concatenate([packed.tokens for packed in replays])
            better = best_for_totals(self.inputs, totals, np.concatenate(weights), self.graphs)
            if self.cost(better) >= self.cost(budgets):
                return budgets
            budgets = better

    def _with_one_moved(self, budgets: Budgets, position: int) -> Iterator[Budgets]:
        """The budgets with the one at `position` at other totals; past the end, with one budget more."""
        others = budgets[:position] + budgets[position + 1 :]
        for budget in self.moves:
            moved = tuple(sorted({*others, budget}))
            if moved[-1] >= self.inputs.largest_image:
                yield moved


def _totals_of_runs(tokens: np.ndarray) -> np.ndarray:
    """Totals of all runs of neighbours in (C, n) sorted calls. A replay holds such a run.

    One call of 2, 3, 7 tokens gives 2, 3, 7, 5, 10, 12.
    """
    offsets = np.concatenate((np.zeros((len(tokens), 1), dtype=np.int64), tokens.cumsum(axis=1)), axis=1)
    count = offsets.shape[1]
    return np.concatenate([(offsets[:, length:] - offsets[:, : count - length]).ravel() for length in range(1, count)])
