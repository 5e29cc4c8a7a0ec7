"""A budget plan for people: tables of waste and budgets, what to paste; and for programs, JSON."""

import dataclasses
import json
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from ..planner.plan import BudgetPlan
from ..planner.vllm import vllm_flag
from ..planner.workload import TokenCounts

OWNERS = {"vllm": "vLLM", "lab": "this library"}


def print_plans(console: Console, name: str, workload: TokenCounts, plans: Mapping[str, BudgetPlan]) -> None:
    """Prints the plans of one workload.

    Args:
        name: of the workload.
        plans: engine -> its plan, "vllm" and "lab".
    """
    console.print(
        f"{name}: {workload.images:,} images, {workload.tokens[0]:,} to {workload.tokens[-1]:,} merged tokens, "
        f"mean {workload.mean:,.0f}",
        soft_wrap=True,
        highlight=False,
    )
    console.print(_waste_table(plans))
    for engine, plan in plans.items():
        console.print(_budget_table(engine, plan))
    vllm, lab = plans["vllm"], plans["lab"]
    runner = f"EncoderCudaGraphRunner(encoder, budgets={list(lab.budgets)}, max_images={lab.max_images})"
    for line in ("for vllm serve:", vllm_flag(vllm.budgets, vllm.max_images), "for this library:", runner):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def plans_as_json(name: str, workload: TokenCounts, plans: Mapping[str, BudgetPlan]) -> str:
    """The plans, and vLLM's flag, as one JSON document."""
    document = {
        "workload": name,
        "images": workload.images,
        "mean_tokens": workload.mean,
        "plans": {engine: dataclasses.asdict(plan) for engine, plan in plans.items()},
        "vllm_flag": vllm_flag(plans["vllm"].budgets, plans["vllm"].max_images),
    }
    return json.dumps(document, indent=2)


def _waste_table(plans: Mapping[str, BudgetPlan]) -> Table:
    baseline = plans["vllm"].powers_of_two
    assert baseline is not None
    columns = {"powers of two,\nvLLM by itself": baseline}
    columns |= {f"planned,\n{OWNERS[engine]}": plan for engine, plan in plans.items()}
    table = Table(title="rows replayed / real rows", title_justify="left", caption_justify="left")
    table.caption = "1 image a call: all images; more: drawn calls, other ones than the search has seen"
    table.add_column("images a call")
    for heading in columns:
        table.add_column(heading, justify="right")
    for images in baseline.waste:
        table.add_row(str(images), *(f"{plan.waste[images]:.3f}" for plan in columns.values()))
    table.add_section()
    table.add_row("graphs", *(str(len(plan.budgets)) for plan in columns.values()))
    table.add_row("static buffers, MiB", *(f"{plan.memory / 2**20:,.0f}" for plan in columns.values()))
    return table


def _budget_table(engine: str, plan: BudgetPlan) -> Table:
    title = f"budgets for {OWNERS[engine]}; images in a replay: at most {plan.max_images}"
    table = Table(title=title, title_justify="left")
    table.add_column("budget, merged tokens", justify="right")
    table.add_column("rows computed", justify="right")
    for images in plan.replays:
        table.add_column(f"replays at {images} a call", justify="right")
    for position, (budget, rows) in enumerate(zip(plan.budgets, plan.rows, strict=True)):
        shares = (f"{replays[position]:.1%}" for replays in plan.replays.values())
        table.add_row(f"{budget:,}", f"{rows:,}", *shares)
    if any(plan.eager.values()):
        table.add_row("eager", "as they are", *(f"{share:.1%}" for share in plan.eager.values()))
    return table
