"""Chooses token budgets for CUDA graphs from the sizes of your images, and reports how a workload runs in any budgets.

A graph of budget B computes B merged tokens, however few its images need. With images of 3 and 7 tokens, one in a call,
the budgets [3, 7] waste nothing; the one budget [7] computes 14 tokens for 10 real ones, a waste of 1.4.

Tokens are not all: each replay takes some time whatever its budget. So budgets are chosen by predicted time, in rows:

    tokens computed + replays * replay_cost

with `replay_cost` from `replay_cost.py`. It is what the exact packer minimises, and what the runner packs by. An image
above every budget runs eager, at its tokens and the higher price of an eager call: it never counts as free.

Test: tests/test_budgets.py.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..checks import as_positive
from ..geometry import IN_TOKEN_LIMIT
from ..graphs.packing import as_budgets
from .engines import ENGINES
from .inputs import PlanInputs
from .replay_cost import REPLAY_COST, eager_cost
from .search import search_budgets, times_by_graphs
from .vllm import MAX_BATCHED_TOKENS, default_max_images, powers_of_two
from .workload import Size

MORE_GRAPHS = 4  # than the plan has, in `by_graphs`
REPORTED_CALLS = 2000  # drawn for the report, for each number of images in a call


@dataclass(frozen=True)
class BudgetPlan:
    """Budgets, and how a workload runs in them. The dictionaries have a value for each number of images in a call.

    Where several ranks share a call, its numbers are those of the rank with the most patches.

    Attributes:
        engine: whose packing, graphs and static buffers are counted; a key of `ENGINES`.
        budgets: merged tokens, ascending.
        max_images: most images in one replay.
        replay_cost: the price of one replay, in rows.
        rows: merged tokens that the graph of each budget computes.
        time: predicted time in rows / real tokens; compare it between plans, it is never 1.
        waste: tokens computed / real tokens: 1 means no waste. An eager image computes its tokens, so read `eager` too.
        replays_a_call: replays and eager calls of one call.
        replays: the share of all replays that each budget has.
        eager: the share of the images that run without a graph, because they exceed every budget.
        memory: bytes of the static buffers (`static_bytes`). Other memory of graphs is not counted.
        exact: True if no other budgets take less time. False where the budgets were searched for, or given.
        by_graphs: at most so many graphs -> predicted time / real tokens, the mean over the numbers of images in a
            call; a search that is less thorough than the plan's. Empty where the budgets were given.
        powers_of_two: vLLM's default budgets on the same calls, packed by vLLM's rule.
    """

    engine: str
    budgets: tuple[int, ...]
    max_images: int
    replay_cost: int
    rows: tuple[int, ...]
    time: dict[int, float]
    waste: dict[int, float]
    replays_a_call: dict[int, float]
    replays: dict[int, tuple[float, ...]]
    eager: dict[int, float]
    memory: int
    exact: bool = False
    by_graphs: dict[int, float] = field(default_factory=dict)
    powers_of_two: "BudgetPlan | None" = None


def plan_budgets(
    sizes: Iterable[Size],
    images_per_call: Sequence[int] = (1,),
    max_graphs: int = 8,
    memory_limit: int | None = None,
    *,
    in_token_limit: int = IN_TOKEN_LIMIT,
    max_images: int | None = None,
    engine: str = "lab",
    replay_cost: int = REPLAY_COST,
    max_batched_tokens: int = MAX_BATCHED_TOKENS,
    ranks: int = 1,
    seed: int = 0,
    on_progress: Callable[[float], object] = lambda share: None,
) -> BudgetPlan:
    """Chooses the budgets with the least predicted time for a workload.

    The result is exact for one image per call, and searched for several.

    Args:
        sizes: (width, height) or (width, height, count), in pixels.
        images_per_call: how many images arrive together. With several numbers, the mean of their times is lowered.
        max_graphs: most budgets.
        memory_limit: bytes of static buffers. Where graphs share buffers it bounds the largest budget; where each graph
            has its own it also bounds how many there are. Images above the largest budget run eager.
        in_token_limit: of the image processor, in patches.
        max_images: most images in one replay. The default is the largest of `images_per_call`, on several ranks what
            one rank gets of it; for vLLM it can be more, so that the graph of the largest budget computes no more than
            that budget.
        engine: "lab" (exact packing, shared buffers) or "vllm" (its packing rule, its graphs, its buffers).
        replay_cost: the price of one replay in rows, 0 or more. The default is predicted for an H100.
        max_batched_tokens: of vLLM's scheduler, or `max_model_len` where that is less: the largest of its own budgets,
            and of those planned for it unless one image is larger.
        ranks: that share the images of a call, balanced by patches as the engines do. The budgets and every number of
            the plan are of the rank with the most patches, which the others wait for.
        seed: of the drawn calls.
        on_progress: called with the share of the search that is done, 0 to 1.

    Raises:
        ValueError: no sizes, or a bad size; a number that is not a positive integer (a price may be 0); an unknown
            engine; a limit of memory that leaves no budget for any image.

    Example:
        `plan_budgets([(640, 480), (28, 28, 9)], max_graphs=2).budgets` is (1, 414).
    """
    inputs = PlanInputs.checked(
        sizes,
        images_per_call,
        engine=engine,
        max_images=max_images,
        memory_limit=memory_limit,
        in_token_limit=in_token_limit,
        replay_cost=replay_cost,
        max_batched_tokens=max_batched_tokens,
        ranks=ranks,
        seed=seed,
    )
    graphs = as_positive("max_graphs", max_graphs)
    budgets = search_budgets(inputs, graphs, on_progress)
    while memory_limit is not None and inputs.engine.memory(budgets, inputs.max_images) > memory_limit:
        graphs = min(graphs, len(budgets)) - 1  # each graph has its own buffers: fewer graphs need less memory
        budgets = search_budgets(inputs, graphs, on_progress)
    searched = inputs.images_per_call != (1,) or not (memory_limit is None or inputs.engine.shares_buffers)
    plan = replace(_report(inputs, engine, budgets), exact=not searched)
    return replace(plan, by_graphs=times_by_graphs(inputs, budgets, len(budgets) + MORE_GRAPHS))


def evaluate_budgets(
    sizes: Iterable[Size],
    budgets: Iterable[int],
    images_per_call: Sequence[int] = (1,),
    *,
    in_token_limit: int = IN_TOKEN_LIMIT,
    max_images: int | None = None,
    engine: str = "lab",
    replay_cost: int = REPLAY_COST,
    max_batched_tokens: int = MAX_BATCHED_TOKENS,
    ranks: int = 1,
    seed: int = 0,
) -> BudgetPlan:
    """Reports how a workload runs in given budgets, on the same calls as `plan_budgets`.

    Arguments and errors are those of `plan_budgets`; `budgets` are positive integers in any order.
    """
    inputs = PlanInputs.checked(
        sizes,
        images_per_call,
        engine=engine,
        max_images=max_images,
        memory_limit=None,
        in_token_limit=in_token_limit,
        replay_cost=replay_cost,
        max_batched_tokens=max_batched_tokens,
        ranks=ranks,
        seed=seed,
    )
    return _report(inputs, engine, as_budgets(budgets))


def _report(inputs: PlanInputs, engine: str, budgets: Sequence[int]) -> BudgetPlan:
    defaults = powers_of_two(most=inputs.default_largest)
    by_vllm = replace(inputs, engine=ENGINES["vllm"], max_images=default_max_images(defaults))
    return replace(_evaluate(inputs, engine, budgets), powers_of_two=_evaluate(by_vllm, "vllm", defaults))


def _evaluate(inputs: PlanInputs, engine: str, budgets: Sequence[int]) -> BudgetPlan:
    graphs = len(budgets)
    time, waste, together, shares, eager = {}, {}, {}, {}, {}
    for images in inputs.images_per_call:
        calls = inputs.calls(images, REPORTED_CALLS, "reported")
        replays = inputs.pack(calls, budgets)
        weights, count = replays.weights, calls.weights.sum()
        held = float(calls.weights @ (calls.tokens > 0).sum(axis=1))  # images
        by_step = np.bincount(replays.steps, weights, minlength=graphs + 1)  # the last: eager, one image each
        time[images] = float(weights @ inputs.cost(replays, budgets)) / calls.real_rows
        prices = by_step[:-1].sum() * inputs.replay_cost + by_step[-1] * eager_cost(inputs.replay_cost)
        waste[images] = time[images] - float(prices) / calls.real_rows
        together[images] = float(by_step.sum() / count)
        shares[images] = tuple((by_step[:-1] / by_step.sum()).tolist())
        eager[images] = float(by_step[-1] / held)
    return BudgetPlan(
        engine=engine,
        budgets=tuple(budgets),
        max_images=inputs.max_images,
        replay_cost=inputs.replay_cost,
        rows=tuple(map(inputs.rows, budgets)),
        time=time,
        waste=waste,
        replays_a_call=together,
        replays=shares,
        eager=eager,
        memory=inputs.engine.memory(budgets, inputs.max_images),
    )
