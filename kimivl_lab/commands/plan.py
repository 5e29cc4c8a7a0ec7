"""`kimivl-lab plan`: image sizes become graph budgets, a table of how they run, and a flag to paste.

The sizes come from a CSV file, a log, a folder of images or a workload of this repository. Torch is imported only to
read images or a record.

Test: tests/test_plan.py, tests/test_faults_commands.py.
"""

import argparse
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from rich.table import Table

from ..images.files import collected_warnings
from ..planner.plan import BudgetPlan, plan_budgets
from ..planner.rounding import Rounding, round_sizes
from ..planner.vllm import READ_IN, WIDEST_ROW, vllm_flag
from ..planner.workload import TokenCounts
from .output import CommandError, progress_bar, show, tell
from .server import Server
from .sources import Sizes, failures_as_messages, read_source

OWNERS = {"vllm": "vLLM", "lab": "this library"}
_SHOWN_SIZES = 12  # of the rounded ones


def run(arguments: argparse.Namespace) -> int:
    """Plans budgets for both engines, prints the plans, and draws them with `--plot`."""
    with failures_as_messages():
        with progress_bar() as progress:
            source = read_source(arguments, lambda paths: progress.track(paths, description="headers"))
            server = Server.of(arguments)
            rounding = None
            if arguments.round_to is not None:
                rounding = round_sizes(source.sizes, arguments.round_to, arguments.in_token_limit)
            plans = {}
            for engine in OWNERS:
                task = progress.add_task(f"budgets, {engine}", total=1.0)
                plans[engine] = plan_budgets(
                    source.sizes,
                    sorted(set(arguments.images_per_call)),
                    arguments.max_graphs,
                    None if arguments.memory_limit_mib is None else arguments.memory_limit_mib * 2**20,
                    in_token_limit=arguments.in_token_limit,
                    max_images=arguments.max_images,
                    engine=engine,
                    replay_cost=server.replay_cost,
                    max_batched_tokens=server.largest_budget,
                    ranks=server.ranks,
                    on_progress=lambda share, task=task: progress.update(task, completed=share),
                )
        if arguments.json:
            show(_as_json(source, server, plans, rounding), plain=True)
        else:
            _show(source, server, plans, rounding, arguments)
        if arguments.plot:
            _draw(arguments.plot, source.name, source.workload, plans)
    return 0


def flag_or_advice(plan: BudgetPlan) -> str:
    """The flag of `vllm serve` for a plan; where vLLM's own budgets take less time, that they should be kept."""
    own = plan.powers_of_two
    assert own is not None
    if sum(plan.time.values()) > sum(own.time.values()):
        return "keep vLLM's own budgets: predicted to take less time than this plan (allow more graphs or memory)"
    return vllm_flag(plan.budgets, plan.max_images)


def _draw(file: Path, name: str, workload: TokenCounts, plans: Mapping[str, BudgetPlan]) -> None:
    from ..plots import use_style
    from ..plots.budgets import plan_overview

    use_style()
    figure, _ = plan_overview(name.replace("$", r"\$"), workload, plans)  # text between two $ would be a formula
    notes: list[str] = []
    try:
        with collected_warnings(file, notes):  # such as a letter of `name` that is in no font
            figure.savefig(file)
    except OSError as error:
        raise CommandError(f"cannot write {file}: {error.strerror or error}") from error
    tell("warning", *notes)


def _show(
    source: Sizes,
    server: Server,
    plans: Mapping[str, BudgetPlan],
    rounding: Rounding | None,
    arguments: argparse.Namespace,
) -> None:
    vllm, lab = plans["vllm"], plans["lab"]
    show(
        *source.summary,
        _comparison(plans, server),
        _by_graphs(vllm),
        *(_budget_table(engine, plan) for engine, plan in plans.items()),
        "for vllm serve (merge it with a --compilation-config that you have):",
        flag_or_advice(vllm),
        *(f"- {line}" for line in _assumptions(source, server, vllm, arguments)),
        "for this library:",
        f"EncoderCudaGraphRunner(encoder, budgets={list(lab.budgets)}, max_images={lab.max_images}, "
        f"replay_cost={lab.replay_cost})",
        "for SGLang:",
        "- it has no budgets: its runner keeps one graph for each exact number of patches, and as read in 0.5.23 none "
        "for Kimi-VL's encoder. --round-to N shows sizes that leave few numbers of patches.",
        *(() if rounding is None else _rounded(rounding)),
    )


def _assumptions(source: Sizes, server: Server, plan: BudgetPlan, arguments: argparse.Namespace) -> list[str]:
    """What the plan for vLLM takes for given, a line each."""
    limits = f"--max-num-batched-tokens {server.batched_tokens} ({server.batched_tokens_source})"
    if arguments.max_images is not None:
        reason = "given"
    elif server.ranks == 1 and plan.max_images == max(plan.time):
        reason = "as many as a call has"
    else:
        reason = f"so that each image's part of the largest budget is at most {WIDEST_ROW}, a row of vLLM's layout"
        reason = f"what a rank may get, and {reason}" if server.ranks > 1 else reason
    lines = [
        f"counted as {READ_IN} packs and captures, for Kimi-VL's image processor and encoder",
        f"{limits} and --max-model-len {server.model_len}: vLLM's own largest budget is {server.largest_budget:,}",
        f"images in one replay: at most {plan.max_images}, {reason}",
        f"one replay costs {server.replay_cost} rows ({server.replay_cost_source}); on your GPU run "
        f"`python -m kimivl_lab.bench.graphs --preset kimi-vl-a3b --dtype bfloat16` and give its record with --rates",
        f"an image above {plan.budgets[-1]:,} merged tokens runs without a graph",
        "static buffers are the inputs and outputs of all graphs; the memory that a forward works in comes on top",
    ]
    if server.ranks > 1:
        shared = f"{server.ranks} ranks share the images of a call, balanced by patches (--mm-encoder-tp-mode data)"
        lines.insert(3, f"{shared}; all numbers are of the rank with the most patches")
    return lines


def _as_json(source: Sizes, server: Server, plans: Mapping[str, BudgetPlan], rounding: Rounding | None) -> str:
    """The plans and vLLM's flag as one JSON document."""
    document = {
        "workload": source.name,
        "images": source.workload.images,
        "mean_tokens": source.workload.mean,
        "images_in_a_line": dict(sorted(source.images_in_a_line.items())),
        "server": dataclasses.asdict(dataclasses.replace(server, measured=None))
        | {
            "gpu": server.gpu.name if server.gpu else None,
            "measured": server.measured and {"device": server.measured.device, "records": server.measured.sources},
        },
        "plans": {engine: dataclasses.asdict(plan) for engine, plan in plans.items()},
        "vllm_flag": vllm_flag(plans["vllm"].budgets, plans["vllm"].max_images),
    }
    if rounding is not None:
        sizes = [[*size, count] for size, count in rounding.sizes.items()]
        document["rounding"] = dataclasses.asdict(dataclasses.replace(rounding, sizes={})) | {"sizes": sizes}
    return json.dumps(document, indent=2)


def _comparison(plans: Mapping[str, BudgetPlan], server: Server) -> Table:
    own = plans["vllm"].powers_of_two
    assert own is not None
    columns = {"vLLM's\nown budgets": own}
    columns |= {f"planned,\n{OWNERS[engine]}": plan for engine, plan in plans.items()}
    table = Table(title="before and after", title_justify="left", caption_justify="left")
    table.caption = (
        "time is predicted: rows, and a price for each replay. 1 image a call: all images. More: drawn calls, not "
        "those that the search has seen"
    )
    table.add_column("")
    for heading in columns:
        table.add_column(heading, justify="right")
    for images in own.time:
        words = f"{images} images a call" if images != 1 else "1 image a call"
        table.add_row(words if server.ranks == 1 else f"{words}, busiest of {server.ranks} ranks", style="bold")
        table.add_row(
            "  predicted time, own = 1", *(f"{one.time[images] / own.time[images]:.2f}" for one in columns.values())
        )
        table.add_row("  rows replayed / real rows", *(f"{one.waste[images]:.3f}" for one in columns.values()))
        table.add_row("  replays a call", *(f"{one.replays_a_call[images]:.2f}" for one in columns.values()))
        table.add_row("  images without a graph", *(f"{one.eager[images]:.1%}" for one in columns.values()))
        table.add_section()
    table.add_row("graphs", *(str(len(one.budgets)) for one in columns.values()))
    table.add_row("static buffers, MiB", *(f"{one.memory / 2**20:,.0f}" for one in columns.values()))
    return table


def _by_graphs(plan: BudgetPlan) -> str:
    """What fewer graphs would cost and more would save."""
    own = plan.powers_of_two
    assert own is not None
    base = sum(own.time.values()) / len(own.time)
    times = ", ".join(f"{number}: {time / base:.3f}" for number, time in plan.by_graphs.items())
    return f"predicted time by number of graphs, vLLM (own budgets = 1): {times}"


def _budget_table(engine: str, plan: BudgetPlan) -> Table:
    title = f"budgets for {OWNERS[engine]}; images in a replay: at most {plan.max_images}"
    table = Table(title=title, title_justify="left")
    table.add_column("budget, merged tokens", justify="right")
    for images in plan.replays:
        table.add_column(f"share of replays at {images} a call", justify="right")
    for position, budget in enumerate(plan.budgets):
        table.add_row(f"{budget:,}", *(f"{replays[position]:.1%}" for replays in plan.replays.values()))
    return table


def _rounded(rounding: Rounding) -> list[str | Table]:
    before, after = rounding.lengths
    table = Table(title=f"sides rounded down to multiples of {rounding.to}", title_justify="left")
    table.add_column("width x height, pixels", justify="right")
    table.add_column("share of images", justify="right")
    total = sum(rounding.sizes.values())
    for (width, height), count in list(rounding.sizes.items())[:_SHOWN_SIZES]:
        table.add_row(f"{width} x {height}", f"{count / total:.1%}")
    if (others := len(rounding.sizes) - _SHOWN_SIZES) > 0:
        table.add_row(f"{others:,} more", "")
    lost = f"{before:,} numbers of patches become {after:,}; {rounding.pixels_lost:.1%} of the pixels are lost"
    return [table, f"- clients resize to these sizes: {lost}"]
