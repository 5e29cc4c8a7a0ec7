"""Budgets for a workload: for one image a call a staircase, exact; for several, packing and staircase in turns.

Given budgets, calls are packed; given the packing, the best budgets for its replays are a staircase over their totals.
With exact packing neither step costs more, so the turns end. Then single budgets are moved to other totals, and stay
where that costs less. The search starts twice: from the best budgets for single images, and from those for whole calls.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np

from ..graphs.packing import Cost
from ..graphs.traffic import Replays, Traffic, pack_traffic
from .engines import Engine
from .staircase import best_steps
from .workload import TokenCounts, all_calls_of_one, draw_calls

Budgets: TypeAlias = tuple[int, ...]

SEEN_CALLS = 256  # of each size, drawn for the search
_MOVES = 48  # totals at which each budget is tried
_PASSES = 4
_TIE = 1.005  # of two outcomes this close in cost, the one with less memory is taken


@dataclass(frozen=True)
class Problem:
    """What budgets are for: a workload in calls of some sizes, an engine, the cost of a replay.

    Attributes:
        largest_rows: most merged tokens that one graph may compute; an image that needs more runs eager.
    """

    workload: TokenCounts
    images_per_call: Sequence[int]
    engine: Engine
    max_images: int
    costs: Literal["rows"] | Cost = "rows"
    largest_rows: float = math.inf
    seed: int = 0

    def budget_for(self, tokens: int) -> int | None:
        """The smallest budget that may be captured and holds `tokens`; None if there is none."""
        if isinstance(self.costs, Mapping):
            at = bisect_left(self.given_budgets, tokens)
            return self.given_budgets[at] if at < len(self.given_budgets) else None
        budget = self.rows(tokens)
        return budget if budget <= self.largest_rows else None

    @cached_property
    def given_budgets(self) -> list[int]:
        """The budgets in `costs`, where that is a mapping, which may be captured."""
        given = self.costs if isinstance(self.costs, Mapping) else ()
        return sorted(budget for budget in given if self.rows(budget) <= self.largest_rows)

    @cached_property
    def largest_image(self) -> int:
        """Merged tokens of the largest image that fits a budget. ValueError if none does."""
        for tokens in self.workload.tokens[::-1].tolist():
            if self.budget_for(tokens) is not None:
                return tokens
        allowed = self.given_budgets if isinstance(self.costs, Mapping) else f"up to {self.largest_rows}"
        raise ValueError(
            f"no budget that may be captured holds an image of this workload: the smallest image has "
            f"{self.workload.tokens[0]} merged tokens, allowed are {allowed}"
        )

    def rows(self, tokens: int) -> int:
        """Merged tokens that the smallest graph which holds so many computes."""
        return self.engine.rows(tokens, self.max_images)

    def price(self, budget: int) -> float:
        """Cost of one replay of a budget. ValueError if it is negative or not finite."""
        if self.costs == "rows":
            return float(self.rows(budget))
        price = float(self.costs[budget] if isinstance(self.costs, Mapping) else self.costs(budget))
        if not 0 <= price < math.inf:
            raise ValueError(f"the cost of budget {budget} must be 0 or more and finite, got {price}")
        return price

    def calls(self, images: int, count: int, purpose: str) -> Traffic:
        """Calls of one size: of one image all that there are; of several `count`, other ones for another purpose."""
        if images == 1:
            return all_calls_of_one(self.workload)
        return draw_calls(self.workload, images, count, f"{purpose} {images} {self.seed}")

    def pack(self, calls: Traffic, budgets: Sequence[int]) -> Replays:
        """The calls packed as the engine does."""
        prices = [self.price(budget) for budget in budgets]
        return pack_traffic(calls, budgets, self.max_images, self.engine.packing, prices)


def search_budgets(
    problem: Problem, graphs: int, on_progress: Callable[[float], object] = lambda share: None
) -> Budgets:
    """At most `graphs` budgets, ascending; the largest holds the largest image that can be held.

    Args:
        on_progress: called with the share of the work that is done, 0 to 1.

    Raises:
        ValueError: no budget that may be captured holds any image; a bad cost.
    """
    single = best_for_totals(problem, problem.workload.tokens, problem.workload.counts, graphs)
    if tuple(problem.images_per_call) == (1,):
        return single
    search = _Search(problem, graphs)
    whole_calls = best_for_totals(problem, *search.totals_of_calls(), graphs)
    found = [single, whole_calls]
    for begun, start in ((0.0, single), (0.5, whole_calls)):
        found.append(search.improve(start, lambda share, begun=begun: on_progress(begun + share / 2)))
    on_progress(1.0)
    close = [budgets for budgets in found if search.cost(budgets) <= _TIE * min(map(search.cost, found))]
    lightest = min(close, key=lambda one: (problem.engine.memory(one, problem.max_images), search.cost(one)))
    return search.reached(lightest)


def best_for_totals(problem: Problem, tokens: np.ndarray, weights: np.ndarray, graphs: int) -> Budgets:
    """The best budgets where each total is replayed alone; exact. A total that no budget holds is left out.

    Args:
        tokens: (m,) merged tokens of each replay.
        weights: (m,) how often it comes.
    """
    wanted: dict[int, float] = {}
    covered = [*zip(tokens.tolist(), weights.tolist(), strict=True), (problem.largest_image, 0.0)]
    for total, weight in covered:
        if (budget := problem.budget_for(total)) is not None:
            wanted[budget] = wanted.get(budget, 0.0) + weight
    cheapest: dict[int, tuple[float, int]] = {}  # by budget: price and budget of the cheapest at or above it
    least = (math.inf, 0)
    for budget in sorted({*wanted, *problem.given_budgets}, reverse=True):
        least = cheapest[budget] = min(least, (problem.price(budget), budget))
    budgets = sorted(wanted)
    steps = best_steps([wanted[budget] for budget in budgets], [cheapest[budget][0] for budget in budgets], graphs)
    return tuple(sorted({cheapest[budgets[step]][1] for step in steps}))


class _Search:
    """Drawn calls, and budgets that cost less and less on them."""

    def __init__(self, problem: Problem, graphs: int) -> None:
        self.problem, self.graphs = problem, graphs
        self.calls = [problem.calls(images, SEEN_CALLS, "seen") for images in problem.images_per_call]
        runs = np.concatenate([_runs(calls.tokens) for calls in self.calls])
        totals = np.quantile(runs, np.linspace(0, 1, _MOVES), method="nearest")
        budgets = {problem.budget_for(total) for total in totals.tolist()}
        self.moves = sorted(budget for budget in budgets if budget is not None)
        self._costs: dict[Budgets, float] = {}

    def totals_of_calls(self) -> tuple[np.ndarray, np.ndarray]:
        """(m,) merged tokens of whole calls, and their weights."""
        weights = [calls.weights / calls.real_rows for calls in self.calls]
        return np.concatenate([calls.tokens.sum(axis=1) for calls in self.calls]), np.concatenate(weights)

    def cost(self, budgets: Budgets) -> float:
        """Mean over the sizes of calls of cost / real rows; eager replays cost nothing, being the same for all."""
        if budgets not in self._costs:
            prices = np.array([*(self.problem.price(budget) for budget in budgets), 0.0])
            costs = [
                replays.weights @ prices[replays.steps] / calls.real_rows
                for calls in self.calls
                for replays in [self.problem.pack(calls, budgets)]
            ]
            self._costs[budgets] = float(np.mean(costs))
        return self._costs[budgets]

    def reached(self, budgets: Budgets) -> Budgets:
        """Without the budgets that no drawn call is replayed in, but with the largest."""
        steps = {step for calls in self.calls for step in self.problem.pack(calls, budgets).steps.tolist()}
        return tuple(budget for step, budget in enumerate(budgets) if step in steps or budget == budgets[-1])

    def improve(self, budgets: Budgets, on_progress: Callable[[float], object]) -> Budgets:
        """Turns and moves until neither costs less, or all passes are done."""
        budgets = self._take_turns(budgets)
        for number in range(_PASSES):
            before = budgets
            for position in range(self.graphs):
                budgets = min([budgets, *self._moved(budgets, position)], key=self.cost)
                on_progress((number * self.graphs + position + 1) / (_PASSES * self.graphs))
            budgets = self._take_turns(budgets)
            if budgets == before:
                break
        return budgets

    def _take_turns(self, budgets: Budgets) -> Budgets:
        while True:
            replays = [self.problem.pack(calls, budgets) for calls in self.calls]
            weights = [packed.weights / calls.real_rows for packed, calls in zip(replays, self.calls, strict=True)]
            totals = np.concatenate([packed.tokens for packed in replays])
            better = best_for_totals(self.problem, totals, np.concatenate(weights), self.graphs)
            if self.cost(better) >= self.cost(budgets):
                return budgets
            budgets = better

    def _moved(self, budgets: Budgets, position: int) -> Iterator[Budgets]:
        """One budget elsewhere, or one more where there are fewer than may be."""
        others = budgets[:position] + budgets[position + 1 :]
        for budget in self.moves:
            moved = tuple(sorted({*others, budget}))
            if moved[-1] >= self.problem.largest_image:
                yield moved


def _runs(tokens: np.ndarray) -> np.ndarray:
    """Totals of all runs of neighbours in (C, n) sorted calls: what a replay may hold."""
    offsets = np.concatenate((np.zeros((len(tokens), 1), dtype=np.int64), tokens.cumsum(axis=1)), axis=1)
    count = offsets.shape[1]
    return np.concatenate([(offsets[:, length:] - offsets[:, : count - length]).ravel() for length in range(1, count)])
