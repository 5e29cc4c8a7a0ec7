"""Chooses token budgets for CUDA graphs from the sizes of your images, and reports what any budgets waste.

A graph of budget B computes B merged tokens, however few its images need. With images of 3 and 7 tokens, one in a call,
the budgets [3, 7] waste nothing; the one budget [7] computes 14 tokens for 10 real ones, a waste of 1.4.

Test: tests/test_budgets.py.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..checks import as_positive
from ..geometry import IN_TOKEN_LIMIT
from ..graphs.packing import as_budgets
from .engines import ENGINES
from .inputs import PlanInputs
from .search import search_budgets
from .vllm import default_max_images, powers_of_two
from .workload import Size

REPORTED_CALLS = 2000  # drawn for the report, for each number of images in a call


@dataclass(frozen=True)
class BudgetPlan:
    """Budgets, and how a workload runs in them.

    Attributes:
        engine: whose packing, graphs and static buffers are counted; a key of `ENGINES`.
        budgets: merged tokens, ascending.
        max_images: most images in one replay.
        rows: merged tokens that the graph of each budget computes.
        waste: by images per call, tokens computed / real tokens: 1 means no waste. An eager image computes its tokens.
        replays: by images per call, the share of all replays that each budget has.
        eager: by images per call, the share of all replays that run eager, because an image exceeds every budget.
        memory: bytes of the static buffers (`static_bytes`). Other memory of graphs is not counted.
        exact: True if no other budgets compute fewer tokens. False where the budgets were searched for, or given.
        powers_of_two: vLLM's default budgets on the same calls, packed by vLLM's rule.
    """

    engine: str
    budgets: tuple[int, ...]
    max_images: int
    rows: tuple[int, ...]
    waste: dict[int, float]
    replays: dict[int, tuple[float, ...]]
    eager: dict[int, float]
    memory: int
    exact: bool = False
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
    seed: int = 0,
    on_progress: Callable[[float], object] = lambda share: None,
) -> BudgetPlan:
    """Chooses the budgets that compute the fewest tokens for a workload.

    The result is exact for one image per call, and searched for several.

    Args:
        sizes: (width, height) or (width, height, count), in pixels.
        images_per_call: how many images arrive together. With several numbers, the mean of their waste is lowered.
        max_graphs: most budgets.
        memory_limit: bytes of static buffers. Where graphs share buffers it bounds the largest budget; where each graph
            has its own it also bounds how many there are. Images above the largest budget run eager.
        in_token_limit: of the image processor, in patches.
        max_images: most images in one replay. The default is the largest of `images_per_call`; for vLLM it can be more,
            so that the graph of the largest budget computes no more than that budget.
        engine: "lab" (exact packing, shared buffers) or "vllm" (its packing rule, its graphs, its buffers).
        seed: of the drawn calls.
        on_progress: called with the share of the search that is done, 0 to 1.

    Raises:
        ValueError: no sizes, or a bad size; a number that is not a positive integer; an unknown engine; a limit of
            memory that leaves no budget for any image.

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
        seed=seed,
    )
    graphs = as_positive("max_graphs", max_graphs)
    budgets = search_budgets(inputs, graphs, on_progress)
    while memory_limit is not None and inputs.engine.memory(budgets, inputs.max_images) > memory_limit:
        graphs = min(graphs, len(budgets)) - 1  # each graph has its own buffers: fewer graphs need less memory
        budgets = search_budgets(inputs, graphs, on_progress)
    searched = inputs.images_per_call != (1,) or not (memory_limit is None or inputs.engine.shares_buffers)
    return replace(_report(inputs, engine, budgets), exact=not searched)


def evaluate_budgets(
    sizes: Iterable[Size],
    budgets: Iterable[int],
    images_per_call: Sequence[int] = (1,),
    *,
    in_token_limit: int = IN_TOKEN_LIMIT,
    max_images: int | None = None,
    engine: str = "lab",
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
        seed=seed,
    )
    return _report(inputs, engine, as_budgets(budgets))


def _report(inputs: PlanInputs, engine: str, budgets: Sequence[int]) -> BudgetPlan:
    defaults = powers_of_two()
    by_vllm = replace(inputs, engine=ENGINES["vllm"], max_images=default_max_images(defaults))
    return replace(_evaluate(inputs, engine, budgets), powers_of_two=_evaluate(by_vllm, "vllm", defaults))


def _evaluate(inputs: PlanInputs, engine: str, budgets: Sequence[int]) -> BudgetPlan:
    rows = [inputs.rows(budget) for budget in budgets]
    eager = len(budgets)  # the step of a replay that fits no budget
    waste, shares = {}, {}
    for images in inputs.images_per_call:
        calls = inputs.calls(images, REPORTED_CALLS, "reported")
        replays = inputs.pack(calls, budgets)
        computed = np.where(replays.steps == eager, replays.tokens, np.append(rows, 0)[replays.steps])
        waste[images] = float(replays.weights @ computed) / calls.real_rows
        share = np.bincount(replays.steps, replays.weights, minlength=eager + 1) / replays.weights.sum()
        shares[images] = tuple(share.tolist())
    return BudgetPlan(
        engine=engine,
        budgets=tuple(budgets),
        max_images=inputs.max_images,
        rows=tuple(rows),
        waste=waste,
        replays={images: share[:-1] for images, share in shares.items()},
        eager={images: share[-1] for images, share in shares.items()},
        memory=inputs.engine.memory(budgets, inputs.max_images),
    )
