"""Graphs against the eager tower: budgets at several fills, capture time and memory, host time by depth.

    python -m kimivl_lab.bench.graphs [--quick] [--preset lab] [--dtype float32] [--out DIR] [--device cpu]

The phase "budget" times whole calls, from grids to features, of one image that fills a budget in part or whole. Every
call is first compared with the float32 reference while the pool, the output and, on a GPU, the padding are filled with
NaN. The phase "capture" is what each graph costs. The phase "host" times the forward alone, with its metadata given:
of narrow towers by depth, where nearly all the time is the host's, and of the "tiny" preset. On a GPU this is the time
until the host is free again. `launches_count` counts what the host starts: operators on a CPU; kernels, copies and
graphs on a GPU.

Test: tests/test_graph_bench.py, tests/test_benchmarks.py. Record: graphs__*.csv.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..config import MoonViTConfig
from ..geometry import GridLike, num_tokens
from ..graphs.runner import EncoderCudaGraphRunner
from ..measure.accuracy import checked_errors
from ..moonvit.model import MoonVitPretrainedModel
from ..private_api import TorchDispatchMode
from . import harness
from .compare import time_variants, variant_rows
from .towers import noise, reference_and_tower

BUDGETS = {"cpu": (4, 16, 64, 256, 1104), "cuda": (4, 16, 64, 256, 576, 1104, 2208)}
QUICK_BUDGETS = (4, 64)
FILLS = (0.5, 0.75, 1.0)
DEPTHS = (1, 2, 4, 8, 16, 27)
NARROW = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 32}
HOST_GRID: GridLike = (4, 4)
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}
HOST_ROUNDS = 10  # times the rounds of whole calls: these are short
PAYS = 1.05  # a replay that is faster by less is not counted as faster
COLUMNS = harness.columns("phase tokens budget_tokens layers_count launches_count capture_ms pool_mib")


def image_of(tokens: int) -> GridLike:
    """The squarest grid of exactly so many merged tokens, or of as many as one image can have below that."""
    for count in range(tokens, 0, -1):
        for rows in range(math.isqrt(count), 0, -1):
            if count % rows == 0 and count // rows < 256:
                return 2 * rows, 2 * count // rows
    raise ValueError(f"an image has at least one token, got {tokens}")


def budget_rows(options: argparse.Namespace) -> Iterator[harness.Row]:
    """Whole calls, then what each graph cost."""
    exact, tower = reference_and_tower(options)
    budgets = QUICK_BUDGETS if options.quick else BUDGETS[tower.device.type]
    runner = EncoderCudaGraphRunner(tower, budgets, max_images=8, max_waste=None)
    errors: dict[int, float] = {}
    for budget in budgets:
        for fill in FILLS:
            grid = image_of(round(fill * budget))
            tokens, pixels = num_tokens(grid), noise([grid], options.seed).to(tower.device)
            want = exact(pixels, [grid])
            runs = {"eager": partial(tower, pixels, [grid]), "replay": partial(runner, pixels, [grid])}
            runner.poison = ("pool", "padding") if tower.device.type == "cuda" else ("pool",)
            found = checked_errors(runs, want, TOLERANCE[options.dtype])
            runner.poison = ()
            errors[budget] = found["replay"]
            case = f"budget {budget}, {tokens} tokens"
            more = {"phase": "budget", "tokens": tokens, "budget_tokens": budget}
            yield from compared(options, case, runs, found, tower, **more)
    for budget, calls in runner.stats.graphs.items():
        yield {
            "case": f"budget {budget}",
            "variant": "replay",
            "phase": "capture",
            "budget_tokens": budget,
            "layers_count": tower.config.num_hidden_layers,
            "capture_ms": round(calls.capture_seconds * 1e3, 2),
            "pool_mib": round(calls.nbytes / 2**20, 3),
            "relative_error": f"{errors[budget]:.3g}",
        }


def host_rows(options: argparse.Namespace) -> Iterator[harness.Row]:
    """The forward alone, of narrow towers by depth and of the preset "tiny"."""
    configs = {
        f"narrow, {depth} layers": MoonViTConfig.preset("tiny", **NARROW, num_hidden_layers=depth)
        for depth in (DEPTHS[1::2] if options.quick else DEPTHS)
    }
    configs["tiny"] = MoonViTConfig.preset("tiny")
    pixels, tokens = noise([HOST_GRID], options.seed).to(options.device), num_tokens(HOST_GRID)
    for name, config in configs.items():
        torch.manual_seed(options.seed)
        tower = MoonVitPretrainedModel(config).eval().to(options.device)
        want = tower(pixels, [HOST_GRID])
        tower = tower.to(getattr(torch, options.dtype))
        runner = EncoderCudaGraphRunner(tower, [tokens], max_images=1)
        metadata, patches = tower.prepare_encoder_metadata([HOST_GRID]), pixels.to(tower.dtype)
        eager = partial(tower, patches, encoder_metadata=metadata)
        checked = {"eager": eager, "replay": partial(runner, pixels, [HOST_GRID])}
        errors = checked_errors(checked, want, TOLERANCE[options.dtype])
        runs = {"eager": eager, "replay": runner.graph(tokens).replay}
        case = f"{name}, {len(patches)} patches"
        more = {"phase": "host", "tokens": tokens}
        yield from compared(options, case, runs, errors, tower, **more)


def compared(
    options: argparse.Namespace,
    case: str,
    runs: Mapping[str, Callable[[], Any]],
    errors: Mapping[str, float],
    tower: MoonVitPretrainedModel,
    *,
    phase: str,
    **more: Any,
) -> Iterator[harness.Row]:
    """One row for each variant: timed on the device's clock, or on the host's alone for the phase "host"."""
    harness.progress(f"graphs: {case}")
    cuda = tower.device.type == "cuda"
    host = {"device": "cpu", "repeats": HOST_ROUNDS * options.repeats} if phase == "host" else {}
    timings = time_variants(
        options, case, runs, on_round=(lambda done: torch.cuda.synchronize()) if cuda else None, **host
    )
    for row in variant_rows(case, timings, errors, "eager"):
        layers, started = tower.config.num_hidden_layers, launches(runs[row["variant"]], cuda)
        yield row | {"phase": phase, "layers_count": layers, "launches_count": started, **more}


class _Operators(TorchDispatchMode):
    """Counts operators that compute: not views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def launches(run: Callable[[], Any], cuda: bool) -> int:
    """How often one call starts work."""
    if not cuda:
        with _Operators() as operators:
            run()
        return operators.count
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        run()
        torch.cuda.synchronize()
    starts = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
    return sum(event.count for event in profile.key_averages() if event.key.startswith(starts))


def crossover(rows: list[harness.Row]) -> int | None:
    """The smallest budget at which, and above which, no replay of a full budget pays; None if the largest one pays."""
    slow: int | None = None
    for row in rows:
        if row["phase"] == "budget" and row["variant"] == "replay" and row["tokens"] == row["budget_tokens"]:
            if row["speedup_ratio"] >= PAYS:
                slow = None
            elif slow is None:
                slow = row["tokens"]
    return slow


@torch.no_grad()  # weights made in inference mode are cached nowhere on a GPU
def rows(options: argparse.Namespace) -> Iterator[harness.Row]:
    """The rows of one record."""
    yield from host_rows(options)
    yield from budget_rows(options)


def summary(rows: list[harness.Row]) -> dict[str, Any]:
    """Speed-ups of replays, where they end, and the time of all captures."""
    replays = [row for row in rows if row["variant"] == "replay"]
    return {
        "host_speedup": {row["case"]: row["speedup_ratio"] for row in replays if row["phase"] == "host"},
        "speedup": {row["case"]: row["speedup_ratio"] for row in replays if row["phase"] == "budget"},
        "crossover_tokens": crossover(rows),
        "capture_ms": sum(row["capture_ms"] for row in replays if row["phase"] == "capture"),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser("graphs", __doc__, dtypes=TOLERANCE, default=("float32",), preset="lab", rounds=(3, 15, 7))
    harness.run_benchmark(parser, COLUMNS, rows, summary, arguments)


if __name__ == "__main__":
    main()
