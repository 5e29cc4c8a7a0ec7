"""Which budgets to capture: those that replay a workload with the fewest rows for nothing.

One image a call, exact: each image is replayed in the smallest budget that holds it, so the best budgets are the best
staircase over the distribution of merged tokens (`staircase`). Several images a call, a search (`search`) over calls
that are drawn from the workload; the waste is then reported on other calls than those it has seen.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ..checks import as_positive
from ..geometry import IN_TOKEN_LIMIT
from ..graphs.packing import Cost, as_budgets
from .engines import ENGINES, static_bytes
from .search import Problem, search_budgets
from .vllm import default_max_images, powers_of_two
from .workload import Size, count_tokens

REPORTED_CALLS = 2000  # of each size, drawn for the report


@dataclass(frozen=True)
class BudgetPlan:
    """Budgets, and what they make of a workload.

    Attributes:
        engine: whose packing, allocation and buffers are counted; a key of `ENGINES`.
        budgets: merged tokens, ascending.
        max_images: most images in one replay.
        rows: merged tokens that the graph of each budget computes.
        waste: by images per call, replayed rows / real rows, 1 for none; an eager image counts as it is.
        replays: by images per call, the share of all replays that each budget has.
        eager: by images per call, the share of all replays that are eager, of images above every budget.
        memory: bytes of the static buffers (`static_bytes`); what graphs keep besides them is not counted.
        exact: no other budgets cost less. False where they were searched for, or given.
        powers_of_two: what vLLM captures by itself, packed and allocated by vLLM, on the same calls.
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
    costs: Literal["rows"] | Cost = "rows",
    *,
    in_token_limit: int = IN_TOKEN_LIMIT,
    max_images: int | None = None,
    engine: str = "lab",
    seed: int = 0,
    on_progress: Callable[[float], object] = lambda share: None,
) -> BudgetPlan:
    """The budgets for a workload: exact for one image a call, searched for several.

    Args:
        sizes: (width, height) or (width, height, count), in pixels.
        images_per_call: images that arrive together; of several numbers the mean waste is brought down.
        max_graphs: most budgets.
        memory_limit: bytes of static buffers. Shared buffers bound the largest budget, those of one graph each also how
            many there are. Images above the largest budget run eager.
        costs: of one replay. "rows" that the graph computes; a function of the budget; or a mapping, of measured time,
            say, which then also says which budgets there may be.
        in_token_limit: of the image processor, in patches.
        max_images: most images in one replay. By default as many as arrive together; for vLLM more, where that lets it
            allocate the largest image exactly.
        engine: "lab", exact packing and shared buffers; "vllm", its rule, its allocation, its buffers.
        seed: of the drawn calls.
        on_progress: called with the share of the search that is done, 0 to 1.

    Raises:
        ValueError: no sizes, or bad ones; a number that is not a positive integer; an unknown engine; a cost that is
            missing, negative or not finite; a limit or costs that leave no budget for any image.
    """
    problem = _problem(sizes, images_per_call, engine, max_images, costs, memory_limit, in_token_limit, seed)
    budgets: tuple[int, ...] = ()
    for graphs in range(as_positive("max_graphs", max_graphs), 0, -1):
        budgets = search_budgets(problem, graphs, on_progress)
        if memory_limit is None or problem.engine.memory(budgets, problem.max_images) <= memory_limit:
            break
    searched = problem.images_per_call != (1,) or not (memory_limit is None or problem.engine.shares_buffers)
    plan = _report(problem, engine, budgets)
    return replace(plan, exact=not searched, powers_of_two=_powers_of_two(problem))


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
    """What given budgets make of a workload, on the calls that `plan_budgets` reports on.

    Arguments and errors are those of `plan_budgets`, and `as_budgets`.
    """
    problem = _problem(sizes, images_per_call, engine, max_images, "rows", None, in_token_limit, seed)
    return replace(_report(problem, engine, as_budgets(budgets)), powers_of_two=_powers_of_two(problem))


def _problem(
    sizes: Iterable[Size],
    images_per_call: Sequence[int],
    engine: str,
    max_images: int | None,
    costs: Literal["rows"] | Cost,
    memory_limit: int | None,
    in_token_limit: int,
    seed: int,
) -> Problem:
    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}: one of {', '.join(ENGINES)}")
    together = tuple(sorted({as_positive("images_per_call", images) for images in images_per_call}))
    if not together:
        raise ValueError("images_per_call is empty: give at least one number")
    if isinstance(costs, str) and costs != "rows":
        raise ValueError(f"costs must be 'rows', a function or a mapping, got {costs!r}")
    largest_rows = math.inf
    if memory_limit is not None:
        largest_rows = as_positive("memory_limit", memory_limit) // static_bytes(1)
    workload = count_tokens(sizes, in_token_limit)
    if max_images is None:
        max_images = ENGINES[engine].slots(int(workload.tokens[-1]), together[-1])
    slots = as_positive("max_images", max_images)
    return Problem(workload, together, ENGINES[engine], slots, costs, largest_rows, seed)


def _powers_of_two(problem: Problem) -> BudgetPlan:
    budgets = powers_of_two()
    by_itself = replace(problem, engine=ENGINES["vllm"], max_images=default_max_images(budgets), costs="rows")
    return _report(by_itself, "vllm", budgets)


def _report(problem: Problem, engine: str, budgets: Sequence[int]) -> BudgetPlan:
    rows = [problem.rows(budget) for budget in budgets]
    waste, shares = {}, {}
    for images in problem.images_per_call:
        calls = problem.calls(images, REPORTED_CALLS, "reported")
        replays = problem.pack(calls, budgets)
        computed = np.append(rows, 0)[replays.steps]
        computed[replays.steps == len(budgets)] = replays.tokens[replays.steps == len(budgets)]
        waste[images] = float(replays.weights @ computed) / calls.real_rows
        share = np.bincount(replays.steps, replays.weights, minlength=len(budgets) + 1) / replays.weights.sum()
        shares[images] = tuple(share.tolist())
    return BudgetPlan(
        engine=engine,
        budgets=tuple(budgets),
        max_images=problem.max_images,
        rows=tuple(rows),
        waste=waste,
        replays={images: share[:-1] for images, share in shares.items()},
        eager={images: share[-1] for images, share in shares.items()},
        memory=problem.engine.memory(budgets, problem.max_images),
    )
