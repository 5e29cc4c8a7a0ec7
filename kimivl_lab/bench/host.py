"""Host time of a forward and of a replay: 27 narrow layers, in which there is next to nothing to compute.

    python -m kimivl_lab.bench.host [--quick] [--out DIR] [--device cpu]

What remains is what the host does: it chooses kernels, looks at the weights, makes metadata, copies, and launches. Two
bare lists are the measure, with the same values and without modules, switches or checks: `operators`, the functions of
the eager forward written one after another by hand, and `replay`, the captured program or graph alone. The lines
"part: ..." are pieces of `eager` and of `runner`, timed alone.

The weights are "checked" (the rule on a CPU) or "announced" (the rule on a GPU); see `EncoderOptions.weights`. Times
are those of the host's clock on a GPU too: nothing waits for the device.

Test: tests/test_benchmarks.py. Record: host__*.csv.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import EncoderOptions, MoonViTConfig
from ..geometry import Grid, as_grid_list
from ..graphs.runner import EncoderCudaGraphRunner
from ..kernels.packed_linear import packed_copy, refresh_packed
from ..kernels.rotation import rotate_in_place
from ..measure.accuracy import checked_errors
from ..moonvit.layers import ResolvedOptions
from ..moonvit.metadata import EncoderMetadata
from ..moonvit.model import MoonVitPretrainedModel
from . import harness
from .compare import time_variants, variant_rows
from .towers import noise

COLUMNS = harness.columns("images")
LAYERS, GRID = 27, Grid(4, 4)
NARROW = {"hidden_size": 72, "num_attention_heads": 1, "intermediate_size": 72, "num_hidden_layers": LAYERS}
CASES = (("announced", "plain"), ("announced", "auto"), ("checked", "plain"), ("checked", "auto"))
IMAGES = (1, 8)

Run = Callable[[], Any]
Check = Callable[[], Tensor]


def tower_of(options: argparse.Namespace, weights: str, linear: str) -> MoonVitPretrainedModel:
    """A tower of the published depth whose layers are as narrow as one head."""
    torch.manual_seed(options.seed)
    switches = EncoderOptions(weights=weights, linear=linear)
    tower = MoonVitPretrainedModel(MoonViTConfig.preset("tiny", **NARROW), switches).eval()
    return tower.to(options.device, getattr(torch, options.dtype))


def bare_operators(tower: MoonVitPretrainedModel, pixels: Tensor, grids: list[Grid]) -> Run:
    """The functions of `tower(pixels, grids)` with all operands at hand. Call it after a forward, which packs weights.

    Metadata is not made again: what it takes is a part by itself.
    """
    metadata, options = tower.prepare_encoder_metadata(grids), tower.resolve_options()
    heads, width = tower.config.num_attention_heads, tower.config.hidden_size
    project, last = tower.patch_embed.proj, tower.encoder.final_layernorm
    weight, bias = project.weight.flatten(1), project.bias
    rotate = _bare_rotation(options, metadata)
    blocks = [_bare_block(block, options) for block in tower.encoder.blocks]

    def run() -> Tensor:
        x = F.linear(pixels.flatten(1), weight, bias) + metadata.pos_embeds
        for norm0, wqkv, wo, norm1, fc0, fc1 in blocks:
            qkv = wqkv(norm0(x)).view(-1, 3, heads, width // heads)
            q, k = rotate(qkv.narrow(1, 0, 2)).unbind(1)
            x = wo(options.attend(q, k, qkv.select(1, 2), metadata).flatten(1), residual=x)
            x = fc1(fc0(norm1(x), gelu=True), residual=x)
        x = torch.layer_norm(x, (width,), last.weight, last.bias, last.eps)
        return x.index_select(0, metadata.merge_gather_idx).view(-1, tower.config.merge_size, width)

    return run


def _bare_block(block: nn.Module, options: ResolvedOptions) -> tuple[Callable[..., Tensor], ...]:
    """norm0, wqkv, wo, norm1, fc0 and fc1 of one block as functions."""

    def norm(layer: nn.LayerNorm) -> Callable[[Tensor], Tensor]:
        shape, weight, bias, eps = layer.normalized_shape, layer.weight, layer.bias, layer.eps
        return lambda x: torch.layer_norm(x, shape, weight, bias, eps)

    def linear(layer: nn.Linear) -> Callable[..., Tensor]:
        weight, bias, kernel, copy = layer.weight, layer.bias, options.linear, packed_copy(layer)
        if kernel is not None and copy is not None and (packed := copy.current) is not None:
            multiply, outputs = kernel.multiply, layer.out_features
            return lambda x, residual=None, gelu=False: multiply(x, packed, outputs, bias, residual, gelu)

        def plain(x: Tensor, residual: Tensor | None = None, gelu: bool = False) -> Tensor:
            y = F.linear(x, weight, bias)
            if gelu:
                y = F.gelu(y, approximate="tanh")
            return y if residual is None else residual + y

        return plain

    mlp: Any = block.mlp
    attention = norm(block.norm0), linear(block.wqkv), linear(block.wo)  # ty: ignore[invalid-argument-type]
    return (*attention, norm(block.norm1), linear(mlp.fc0), linear(mlp.fc1))  # ty: ignore[invalid-argument-type]


def _bare_rotation(options: ResolvedOptions, metadata: EncoderMetadata) -> Callable[[Tensor], Tensor]:
    if options.rotate is not rotate_in_place:
        return partial(options.rotate, cos_sin=metadata.rope_cos_sin)
    factors = torch.view_as_complex(metadata.rope_cos_sin)[:, None, None]  # (L, 1, 1, d/2)

    def rotate(qk: Tensor) -> Tensor:
        torch.view_as_complex(qk.view(*qk.shape[:-1], -1, 2)).mul_(factors)
        return qk

    return rotate


def variants(
    tower: MoonVitPretrainedModel, pixels: Tensor, grids: list[Grid]
) -> tuple[dict[str, Run], dict[str, Check]]:
    """What is timed, and how each is checked: features made with its result."""
    runner = EncoderCudaGraphRunner(tower, [len(grids) * GRID.patches // 4], max_images=len(grids), max_waste=None)
    runner(pixels, grids)
    (budget,) = runner.budgets
    tower(pixels, grids)  # packs the weights
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
        "operators": bare_operators(tower, pixels, grids),
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
    return runs, checks


@torch.no_grad()
def rows(options: argparse.Namespace) -> Iterator[harness.Row]:
    """The rows of one record."""
    for weights, linear in CASES[-1:] if options.quick else CASES:
        for images in IMAGES:
            grids = as_grid_list([GRID] * images)
            tower = tower_of(options, weights, linear)
            pixels = noise(grids, options.seed).to(options.device, getattr(torch, options.dtype))
            runs, checks = variants(tower, pixels, grids)
            case = f"{images} image{'s' * (images > 1)}, weights {weights}, linear {linear}"
            harness.progress(f"host {options.dtype} {case}")
            errors = checked_errors(checks, tower(pixels, grids), tolerance=1e-4)
            # The host's clock on a GPU too: what is asked is how long the host is busy.
            timings = time_variants(options, case, runs, device="cpu")
            for row in variant_rows(case, timings, errors, "operators"):
                yield row | {"images": images}


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
