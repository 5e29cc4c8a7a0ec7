"""`kimivl-lab plan`: image sizes become graph budgets, a table of what they waste, and a flag to paste.

The sizes come from a CSV file, a folder of images or a workload of this repository. Torch is imported only to read
images.

Test: tests/test_plan.py, tests/test_faults_commands.py.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from rich.table import Table

from ..datasets import load_sizes
from ..images.files import collected_warnings, find_images, image_sizes, readable_name
from ..planner.plan import BudgetPlan, plan_budgets
from ..planner.vllm import vllm_flag
from ..planner.workload import Size, TokenCounts, count_tokens, read_sizes
from .output import CommandError, on_one_line, progress_bar, show, tell

SHOWN_FAULTS = 20  # of the lines or images that are left out; the others are counted
OWNERS = {"vllm": "vLLM", "lab": "this library"}


def run(arguments: argparse.Namespace) -> int:
    """Plans budgets for both engines, prints the plans, and draws them with `--plot`."""
    try:
        with progress_bar() as progress:
            name, sizes, faults = _sizes(arguments, lambda paths: progress.track(paths, description="headers"))
            for fault in faults[:SHOWN_FAULTS]:
                tell("error", f"skipped {fault}")
            if len(faults) > SHOWN_FAULTS:
                tell("error", f"skipped {len(faults) - SHOWN_FAULTS:,} more")
            if not sizes:
                raise CommandError(f"{name}: no image size could be used")
            plans = {}
            for engine in OWNERS:
                task = progress.add_task(f"budgets, {engine}", total=1.0)
                plans[engine] = plan_budgets(
                    sizes,
                    arguments.images_per_call,
                    arguments.max_graphs,
                    None if arguments.memory_limit_mib is None else arguments.memory_limit_mib * 2**20,
                    in_token_limit=arguments.in_token_limit,
                    max_images=arguments.max_images,
                    engine=engine,
                    on_progress=lambda share, task=task: progress.update(task, completed=share),
                )
        workload = count_tokens(sizes, arguments.in_token_limit)
        if arguments.json:
            show(_as_json(name, workload, plans), plain=True)
        else:
            _show(name, workload, plans)
        if arguments.plot:
            _draw(arguments.plot, name, workload, plans)
    except ValueError as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        named = error.filename and error.strerror
        raise CommandError(f"{error.filename}: {error.strerror}" if named else str(error)) from error
    return 0


def _sizes(
    arguments: argparse.Namespace, track: Callable[[Sequence[Path]], Iterable[Path]]
) -> tuple[str, Sequence[Size], list[str]]:
    """The name of the source, its image sizes, and one message for each line or image that is left out."""
    if arguments.recursive and arguments.images is None:
        raise CommandError("--recursive needs --images")
    if arguments.workload is not None:
        return arguments.workload, load_sizes(arguments.workload), []
    if arguments.sizes is not None:
        sizes, faults = read_sizes(arguments.sizes, arguments.in_token_limit)
        return readable_name(arguments.sizes.resolve().name), sizes, faults
    found = find_images([arguments.images], arguments.recursive)
    if found.left_out:
        tell("note", f"left out: {found}")
    sizes, faults, notes = image_sizes(track([path for _, path in found.files]), arguments.in_token_limit)
    for note in notes:
        tell("warning", note)
    return readable_name(arguments.images.resolve().name), sizes, faults


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
    for note in notes:
        tell("warning", note)


def _show(name: str, workload: TokenCounts, plans: Mapping[str, BudgetPlan]) -> None:
    vllm, lab = plans["vllm"], plans["lab"]
    least, most = workload.tokens[0], workload.tokens[-1]
    show(
        f"{on_one_line(name)}: {workload.images:,} images, "
        f"{least:,} to {most:,} merged tokens, mean {workload.mean:,.0f}",
        _waste_table(plans),
        *(_budget_table(engine, plan) for engine, plan in plans.items()),
        "for vllm serve:",
        vllm_flag(vllm.budgets, vllm.max_images),
        "for this library:",
        f"EncoderCudaGraphRunner(encoder, budgets={list(lab.budgets)}, max_images={lab.max_images})",
    )


def _as_json(name: str, workload: TokenCounts, plans: Mapping[str, BudgetPlan]) -> str:
    """The plans and vLLM's flag as one JSON document."""
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
    columns = {"powers of two,\nvLLM's default": baseline}
    columns |= {f"planned,\n{OWNERS[engine]}": plan for engine, plan in plans.items()}
    table = Table(title="tokens computed / real tokens", title_justify="left", caption_justify="left")
    table.caption = "1 image a call: all images. More: drawn calls, not those that the search has seen"
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
    table.add_column("tokens computed", justify="right")
    for images in plan.replays:
        table.add_column(f"replays at {images} a call", justify="right")
    for position, (budget, computed) in enumerate(zip(plan.budgets, plan.rows, strict=True)):
        shares = (f"{replays[position]:.1%}" for replays in plan.replays.values())
        table.add_row(f"{budget:,}", f"{computed:,}", *shares)
    if any(plan.eager.values()):
        table.add_row("eager", "the real ones", *(f"{share:.1%}" for share in plan.eager.values()))
    return table
