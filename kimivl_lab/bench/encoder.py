"""The whole tower beside the other MoonViTs that run on this machine, same weights, same process, in turn.

    python -m kimivl_lab.bench.encoder [--quick] [--dtype bfloat16] [--preset kimi-vl-a3b] [--out DIR] [--device cpu]

Peers: transformers' Kimi-K2.5 tower with scaled_dot_product_attention, and open-moonvit where it is installed
(`pip install --no-deps open-moonvit loguru`). Random weights: speed does not depend on them. Every variant is compared
with the float32 reference before it is timed. `peak_share` is the share of this machine's own matrix-product rate,
measured in the same rounds by the faster of torch's product and, where it runs, our own; rows of the phase "part" split
one forward of ours by kind of operator (the profiler's self time).
"""

import argparse
import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..config import EncoderOptions, MoonViTConfig
from ..geometry import Grid, patch_counts
from ..kernels.amx.linear import multiply, pack
from ..kernels.packed_linear import packed_unavailable
from ..measure.accuracy import checked_errors
from ..measure.memory import peak_memory_mib
from ..measure.records import Recorder
from ..measure.roofline import matmul, matmul_tflops
from ..measure.timing import time_interleaved
from ..moonvit.flops import tower_flops
from ..moonvit.model import MoonVitPretrainedModel
from . import command
from .peers import peers

CASES: dict[str, list[Grid]] = {
    "32x32": [(32, 32)],
    "64x64": [(64, 64)],
    "mixed": [(24, 32), (46, 34), (16, 20), (60, 44)],
}
PRODUCTS = 8  # the first after a tower finds cold caches, and is no peak
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}
PARTS = {
    "linear": ("linear", "addmm", "aten::mm", "convolution"),
    "attention": ("attention", "varlen", "flash"),
    "norm": ("norm",),
    "rope": ("rotate",),
    "activation": ("gelu",),
    "copy": ("copy", "cat", "contiguous", "to_copy", "index_select"),
    "multiply and add": ("mul", "add"),
}
COLUMNS = (
    "case",
    "variant",
    "phase",
    "patches",
    "latency_ms_p50",
    "latency_ms_p20",
    "latency_ms_p80",
    "repeats",
    "speed_tflops",
    "matmul_peak_tflops",
    "peak_share",
    "speedup_ratio",
    "peak_mem_mib",
    "relative_error",
)


def build(options: argparse.Namespace) -> tuple[MoonVitPretrainedModel, MoonVitPretrainedModel]:
    """(float32 reference, the tower that is timed), same random weights."""
    torch.manual_seed(options.seed)
    reference = EncoderOptions(attention="sdpa", position="interpolate", rope="complex", linear="plain")
    exact = MoonVitPretrainedModel(MoonViTConfig.preset(options.preset), reference).eval()
    tower = MoonVitPretrainedModel(exact.config).eval()
    tower.load_state_dict(exact.state_dict())
    return exact, tower.to(device=options.device, dtype=getattr(torch, options.dtype))


def compiled(tower: MoonVitPretrainedModel) -> MoonVitPretrainedModel:
    """The same weights through compiled blocks."""
    twin = copy.copy(tower)
    twin.set_options(compile=True)
    return twin


def pixels_of(grids: list[Grid], seed: int) -> Tensor:
    """(L, 3, 14, 14) float32 noise of unit variance."""
    return torch.randn(sum(patch_counts(grids)), 3, 14, 14, generator=torch.Generator().manual_seed(seed))


def products(tower: MoonVitPretrainedModel) -> dict[str, Callable[[], object]]:
    """Large square products to time, all of one size, `PRODUCTS` a call."""
    once: dict[str, Callable[[], Tensor]] = {"matmul": matmul(tower.dtype, tower.device)}
    if packed_unavailable("amx", tower.device, tower.dtype) is None:
        size = once["matmul"]().shape[0]
        x, weight = (torch.randn(size, size).to(tower.dtype) for _ in range(2))
        once["matmul, amx"] = partial(multiply, x, pack(weight), size, None, None, False)
    return {name: lambda run=run: [run() for _ in range(PRODUCTS)] for name, run in once.items()}


@torch.inference_mode()
def compare(
    exact: MoonVitPretrainedModel, tower: MoonVitPretrainedModel, options: argparse.Namespace, repeats: int
) -> Iterator[dict[str, Any]]:
    """Rows of a record."""
    others = peers(tower)
    variants = {"kimivl_lab": tower}
    if options.compiled:
        variants["kimivl_lab, compiled"] = compiled(tower)
    squares = products(tower)
    for case, grids in CASES.items():
        if options.quick and case != "32x32":
            continue
        command.progress(f"encoder {options.preset} {options.dtype} {case}: checking")
        pixels = pixels_of(grids, options.seed)
        want = exact(pixels, grids).to(tower.device)
        pixels = pixels.to(tower.device)
        runs: dict[str, Callable[[], Tensor]] = {
            name: partial(variant, pixels, grids) for name, variant in variants.items()
        }
        runs |= {name: prepare(pixels, grids) for name, prepare in others.items()}
        errors = checked_errors(runs, want, TOLERANCE[options.dtype])
        memory = {name: peak_memory_mib(run, tower.device) for name, run in runs.items()}
        timings = time_interleaved(
            {**runs, **squares},
            device=tower.device,
            warmup=0,  # the two calls above
            repeats=repeats,
            on_round=lambda done: command.progress(f"  round {done} of {repeats}"),
        )
        flops, patches = sum(tower_flops(tower.config, grids).values()), pixels.shape[0]
        peak = PRODUCTS * max(matmul_tflops(timings.pop(name), tower.device) for name in squares)
        for name, timing in timings.items():
            speed, used = flops / timing.p50_ms / 1e9, memory[name]
            yield {
                "case": case,
                "variant": name,
                "phase": "forward",
                "patches": patches,
                "speed_tflops": round(speed, 4),
                "matmul_peak_tflops": round(peak, 4),
                "peak_share": round(speed / peak, 4),
                "speedup_ratio": round(timings["transformers"].p50_ms / timing.p50_ms, 3),
                "peak_mem_mib": None if used is None else round(used, 1),
                "relative_error": f"{errors[name]:.3g}",
                **timing.row(),
            }
        for part, milliseconds in parts(runs["kimivl_lab"]).items():
            yield {
                "case": case,
                "variant": f"kimivl_lab, {part}",
                "phase": "part",
                "patches": patches,
                "latency_ms_p50": round(milliseconds, 3),
                "relative_error": f"{errors['kimivl_lab']:.3g}",
            }


def parts(run: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of one call by kind of operator."""
    cuda = torch.cuda.is_available()
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * cuda
    with torch.profiler.profile(activities=activities) as profile:
        run()
    spent = dict.fromkeys((*PARTS, "other"), 0.0)
    for event in profile.key_averages():
        name = event.key.lower()
        part = next((part for part, words in PARTS.items() if any(word in name for word in words)), "other")
        spent[part] += (event.self_device_time_total if cuda else event.self_cpu_time_total) / 1e3
    return spent


def main() -> None:
    parser = command.parser("encoder", __doc__)
    parser.add_argument("--preset", default="kimi-vl-a3b", choices=("tiny", "lab", "kimi-vl-a3b"), help="%(default)s")
    parser.add_argument("--dtype", default="bfloat16", choices=tuple(TOLERANCE), help="%(default)s")
    parser.add_argument("--compiled", action="store_true", help="also with compiled blocks (needs a compiler)")
    parser.add_argument("--repeats", type=int, default=7, help="counted rounds (%(default)s)")
    options = parser.parse_args()
    repeats = 3 if options.quick else options.repeats
    exact, tower = build(options)
    settings = command.settings(options, preset=options.preset, warmup=2, repeats=repeats)
    with Recorder(
        "encoder", options.dtype, COLUMNS, directory=options.out, device=options.device, settings=settings
    ) as record:
        for row in compare(exact, tower, options, repeats):
            record.add(row)
    command.progress(f"wrote {record.path}")
    forwards = [row for row in record.rows if row["phase"] == "forward"]
    command.finish(
        {
            "benchmark": "encoder",
            "dtype": options.dtype,
            "latency_ms_p50": {f"{row['case']} {row['variant']}": row["latency_ms_p50"] for row in forwards},
            "peak_share": {row["case"]: row["peak_share"] for row in forwards if row["variant"] == "kimivl_lab"},
        }
    )


if __name__ == "__main__":
    main()
