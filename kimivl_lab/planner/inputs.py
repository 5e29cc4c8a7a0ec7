"""The checked inputs of a plan: a workload, how its images arrive, an engine and a limit of memory.

Test: tests/test_budgets.py.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..checks import as_not_negative, as_positive
from ..graphs.packing import Replays, Traffic, pack_many
from .engines import ENGINES, LabEngine, static_bytes
from .replay_cost import eager_cost
from .workload import Size, TokenCounts, all_calls_of_one, busiest_rank, count_tokens, draw_calls

_CALLS_FOR_IMAGES = 256  # drawn, to see how many images of a call one rank gets


@dataclass(frozen=True)
class PlanInputs:
    """What the search and the report need to know.

    Attributes:
        images_per_call: ascending, each number once.
        ranks: that share the images of a call; calls are those of the rank with the most patches.
        max_images: most images in one replay.
        largest_rows: most merged tokens that one graph may compute; an image that needs more runs eager.
        replay_cost: the price of one replay, in rows.
        default_largest: the largest budget that vLLM makes by itself.
        seed: of the drawn calls.
    """

    workload: TokenCounts
    images_per_call: tuple[int, ...]
    engine: LabEngine
    max_images: int
    largest_rows: float
    replay_cost: int
    default_largest: int
    seed: int
    ranks: int = 1

    @classmethod
    def checked(
        cls,
        sizes: Iterable[Size],
        images_per_call: Any,
        *,
        engine: str,
        max_images: int | None,
        memory_limit: int | None,
        in_token_limit: int,
        replay_cost: int,
        max_batched_tokens: int,
        seed: int,
        ranks: int,
    ) -> "PlanInputs":
        """The inputs of `plan_budgets`, whose docstring has the meaning of each argument and the errors."""
        if engine not in ENGINES:
            raise ValueError(f"unknown engine {engine!r}: one of {', '.join(ENGINES)}")
        try:
            together = tuple(sorted({as_positive("images_per_call", images) for images in images_per_call}))
        except TypeError as error:
            raise ValueError(f"images_per_call must be a list of positive integers, got {images_per_call!r}") from error
        if not together:
            raise ValueError("images_per_call is empty: give at least one number")
        largest_rows = math.inf
        if memory_limit is not None:
            largest_rows = as_positive("memory_limit", memory_limit) // static_bytes(1)
        workload = count_tokens(sizes, in_token_limit)
        shared_by = as_positive("ranks", ranks)
        if max_images is None:
            drawn = draw_calls(workload, together[-1], _CALLS_FOR_IMAGES, f"shared {seed}")
            most_images = busiest_rank(drawn, shared_by)[1]
            max_images = ENGINES[engine].default_max_images(int(workload.tokens[-1]), most_images)
        slots = as_positive("max_images", max_images)
        most = as_positive("max_batched_tokens", max_batched_tokens)
        if engine == "vllm":  # no call is larger, unless one image alone is
            largest_rows = min(largest_rows, max(most, ENGINES[engine].rows(int(workload.tokens[-1]), slots)))
        price = as_not_negative("replay_cost", replay_cost)
        return cls(workload, together, ENGINES[engine], slots, largest_rows, price, most, seed, shared_by)

    def rows(self, tokens: int) -> int:
        """Merged tokens that the smallest graph computes that holds `tokens`."""
        return self.engine.rows(tokens, self.max_images)

    def budget_for(self, tokens: int) -> int | None:
        """The smallest budget that holds `tokens` and wastes nothing; None if the limit of memory forbids it."""
        budget = self.rows(tokens)
        return budget if budget <= self.largest_rows else None

    @cached_property
    def largest_image(self) -> int:
        """Merged tokens of the largest image that fits a budget. ValueError if no image does."""
        for tokens in self.workload.tokens[::-1].tolist():
            if self.budget_for(tokens) is not None:
                return tokens
        raise ValueError(
            f"no budget that may be captured holds an image of this workload: the smallest image has "
            f"{self.workload.tokens[0]} merged tokens, allowed are up to {self.largest_rows}"
        )

    def calls(self, images: int, count: int, purpose: str) -> Traffic:
        """Calls of `images` images: with one image each, the whole workload; else `count` drawn calls.

        On several ranks a call is what the busiest of them encodes, so it may hold fewer images: leading zeros.
        Calls for another purpose are drawn anew, so that a plan is reported on calls that its search has not seen.
        """
        if images == 1:
            return all_calls_of_one(self.workload)
        drawn = draw_calls(self.workload, images, count, f"{purpose} {images} {self.seed}")
        return busiest_rank(drawn, self.ranks)[0]

    def pack(self, calls: Traffic, budgets: Sequence[int]) -> Replays:
        """The replays of the calls, packed as the engine does."""
        return pack_many(calls, budgets, self.max_images, self.engine.packing, self.replay_cost)

    def cost(self, replays: Replays, budgets: Sequence[int]) -> np.ndarray:
        """(R,) predicted time of each replay, in rows: what its graph computes and the price of a replay.

        A replay that no budget holds runs eager: its tokens, and what the launches of an eager call cost.
        """
        eager = replays.steps == len(budgets)
        rows = np.array([*map(self.rows, budgets), 0])[replays.steps]
        return np.where(eager, replays.tokens + eager_cost(self.replay_cost), rows + self.replay_cost)
