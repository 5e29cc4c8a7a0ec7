"""Host time of a forward and of a replay: 27 narrow layers, in which there is next to nothing to compute.

    python -m kimivl_lab.bench.host [--quick] [--out DIR] [--device cpu]

What remains is what the host does: it chooses kernels, looks at the weights, makes metadata, copies, and launches. Two
bare lists are the measure, with the same values and without any of our Python: `operators`, the operators of the eager
forward one after another, and `replay`, the captured program or graph alone. The lines "part: ..." are pieces of
`eager` and of `runner`, timed alone.

`operators` is a trace. It calls each operator through torch's operator objects, which read their arguments more slowly
than torch's own functions do, and it runs attention by its operator, where `eager` calls the kernel directly. So
`eager` can be faster than `operators`, and a ratio near 1 does not say that the layers' Python is free: `replay` is
nearer to the least time of the host.

The weights are "checked" (the rule on a CPU) or "announced" (the rule on a GPU); see `EncoderOptions.weights`. Times
are those of the host's clock on a GPU too: nothing waits for the device.

Test: tests/test_benchmarks.py. Record: host__*.csv.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from ..config import EncoderOptions, MoonViTConfig
from ..geometry import Grid, as_grid_list
from ..graphs.runner import EncoderCudaGraphRunner
from ..kernels.packed_linear import refresh_packed
from ..measure.accuracy import checked_errors
from ..moonvit.model import MoonVitPretrainedModel
from . import harness
from .compare import time_variants, variant_rows
from .towers import noise

COLUMNS = harness.columns("images operators_count")
LAYERS, GRID = 27, Grid(4, 4)
NARROW = {"hidden_size": 72, "num_attention_heads": 1, "intermediate_size": 72, "num_hidden_layers": LAYERS}
CASES = (("announced", "plain"), ("announced", "auto"), ("checked", "auto"))
IMAGES = (1, 8)

Run = Callable[[], Any]
Check = Callable[[], Tensor]


def tower_of(options: argparse.Namespace, weights: str, linear: str) -> MoonVitPretrainedModel:
    """A tower of the published depth whose layers are as narrow as one head."""
    torch.manual_seed(options.seed)
    switches = EncoderOptions(weights=weights, linear=linear)
    tower = MoonVitPretrainedModel(MoonViTConfig.preset("tiny", **NARROW), switches).eval()
    return tower.to(options.device, getattr(torch, options.dtype))


def variants(
    tower: MoonVitPretrainedModel, pixels: Tensor, grids: list[Grid]
) -> tuple[dict[str, Run], dict[str, Check], int]:
    """What is timed, how each is checked (features made with its result), and how many operators the list has."""
    metadata = tower.prepare_encoder_metadata(grids)
    runner = EncoderCudaGraphRunner(tower, [len(grids) * GRID.patches // 4], max_images=len(grids), max_waste=None)
    runner(pixels, grids)
    (budget,) = runner.budgets
    traced = make_fx(lambda values: tower(values, encoder_metadata=metadata))(pixels)
    operators = sum(node.op == "call_function" for node in traced.graph.nodes)
    graph, captured = runner.graph(budget), runner.capture()
    batch = {"pixel_values": pixels, "image_grid_hws": grids}
    specs = runner.model.get_encoder_cudagraph_item_specs(batch)
    planned = runner._plan(specs, pixels.dtype)

    def copy_in() -> None:
        values = runner.model.prepare_encoder_cudagraph_replay_buffers(batch, len(grids))
        captured.inputs.write(values, len(grids), budget * 4)

    def choose() -> Any:
        return tower.encoder.settle(tower.resolve_options())

    def weights_of_eager() -> None:
        options = choose()
        if options.linear is not None:
            refresh_packed(tower.encoder._linears(), options.linear, options.checked)

    def eager() -> Tensor:
        return tower(pixels, grids)

    def replay() -> Tensor:
        graph.replay()
        return graph.output

    def run() -> Tensor:
        return runner(pixels, grids)

    runs: dict[str, Run] = {
        "eager": eager,
        "operators": lambda: traced(pixels),
        "runner": run,
        "replay": replay,
        "part: kernel choice": choose,
        "part: packed weights": weights_of_eager,
        "part: metadata": lambda: tower.prepare_encoder_metadata(grids),
        "part: captured weights": captured.weights.check,
        "part: plan": lambda: runner._plan(specs, pixels.dtype),
        "part: metadata and copies in": copy_in,
    }

    def after(part: Run, then: Check) -> Check:
        def check() -> Tensor:
            part()
            return then()

        return check

    checks: dict[str, Check] = {
        **{name: runs[name] for name in ("eager", "operators", "runner")},
        "replay": after(copy_in, replay),
        "part: kernel choice": after(choose, eager),
        "part: packed weights": after(weights_of_eager, eager),
        "part: metadata": lambda: tower(pixels, encoder_metadata=tower.prepare_encoder_metadata(grids)),
        "part: captured weights": after(captured.weights.check, run),
        "part: plan": lambda: run() if planned == runner._plan(specs, pixels.dtype) else pixels,
        "part: metadata and copies in": after(copy_in, replay),
    }
    return runs, checks, operators


@torch.no_grad()
def rows(options: argparse.Namespace) -> Iterator[harness.Row]:
    """The rows of one record."""
    for weights, linear in CASES[-1:] if options.quick else CASES:
        for images in IMAGES:
            grids = as_grid_list([GRID] * images)
            tower = tower_of(options, weights, linear)
            pixels = noise(grids, options.seed).to(options.device, getattr(torch, options.dtype))
            runs, checks, operators = variants(tower, pixels, grids)
            case = f"{images} image{'s' * (images > 1)}, weights {weights}, linear {linear}"
            harness.progress(f"host {options.dtype} {case}")
            errors = checked_errors(checks, tower(pixels, grids), tolerance=1e-4)
            # The host's clock on a GPU too: what is asked is how long the host is busy.
            timings = time_variants(options, case, runs, device="cpu")
            for row in variant_rows(case, timings, errors, "operators"):
                yield row | {"images": images, "operators_count": operators}


def summary(rows: list[harness.Row]) -> dict[str, Any]:
    """Microseconds of each variant, and what eager and runner cost over their bare lists, for each case."""
    cases: dict[str, dict[str, float]] = {}
    for row in rows:
        cases.setdefault(row["case"], {})[row["variant"]] = 1000 * row["latency_ms_p50"]
    return {
        case: {
            "eager_over_operators": round(us["eager"] / us["operators"], 3),
            "runner_over_replay": round(us["runner"] / us["replay"], 3),
            "runner_minus_replay_us": round(us["runner"] - us["replay"]),
            "us": {name: round(value) for name, value in us.items()},
        }
        for case, us in cases.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser("host", __doc__, dtypes=("float32",), rounds=(20, 200, 20))
    harness.run_benchmark(parser, COLUMNS, rows, summary, arguments)


if __name__ == "__main__":
    main()
