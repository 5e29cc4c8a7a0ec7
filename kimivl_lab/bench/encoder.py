"""The whole tower beside others' MoonViT: same weights, same process, timed in the same rounds.

    python -m kimivl_lab.bench.encoder [--quick] [--dtype bfloat16] [--preset kimi-vl-a3b] [--out DIR] [--device cpu]

The peers are those of `kimivl_lab.bench.peers` that are installed: transformers' Kimi-K2.5 tower, which speed-ups are
over, kornia's, and vLLM's where the Python of its environment runs this. The weights are random: speed does not
depend on them. Every variant is compared with the float32 reference before it is timed.
`peak_share` is the share of this machine's own matrix-product rate. That rate is measured in the same rounds, by the
fastest product that runs here, in the dtype that our layers compute in, and is at least the rate of the fastest tower;
`peak_spread_ratio` is its noise. A quick run measures no rate.
The rows of the phase "part" split one of our forwards by kind of operator: the profiler's self time, on a GPU that of
the kernels which an operator launched.

Test: tests/test_benchmarks.py. Record: encoder__*.csv.
"""

import argparse
import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from ..geometry import GridLike
from ..measure.accuracy import checked_errors
from ..measure.memory import peak_memory_mib
from ..measure.roofline import matmul, matmul_tflops
from ..measure.timing import Timing
from ..moonvit.flops import tower_flops
from ..moonvit.model import MoonVitPretrainedModel
from . import harness
from .compare import time_variants, variant_rows
from .peers import PEERS, peers
from .towers import noise, reference_and_tower

CASES: dict[str, Sequence[GridLike]] = {
    "32x32": [(32, 32)],
    "64x64": [(64, 64)],
    "mixed": [(24, 32), (46, 34), (16, 20), (60, 44)],
}
PRODUCTS = 8  # the first after a tower finds cold caches, and is no peak
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}
PARTS = {  # in the order of looking up: compiled code is the rotation's, though its names hold "mul" and "cat"
    "rope": ("rotate", "triton", "torch-compiled"),
    "linear": ("linear", "addmm", "aten::mm", "convolution"),
    "attention": ("attention", "varlen", "flash"),
    "norm": ("norm",),
    "activation": ("gelu",),
    "copy": ("copy", "cat", "contiguous", "to_copy", "index_select", "memcpy"),
    "multiply and add": ("mul", "add"),
}
COLUMNS = harness.columns("phase patches speed_tflops matmul_peak_tflops peak_share peak_spread_ratio peak_mem_mib")


def compiled(tower: MoonVitPretrainedModel) -> MoonVitPretrainedModel:
    """The same weights through compiled blocks."""
    twin = copy.copy(tower)
    twin.set_options(compile=True)
    return twin


def products(tower: MoonVitPretrainedModel) -> dict[str, Callable[[], object]]:
    """A large square product to time, `PRODUCTS` a call, in the dtype that the tower computes in."""
    product = matmul(tower.layer_dtype(), tower.device)
    return {"matmul": lambda: [product() for _ in range(PRODUCTS)]}


def peak_of(products: Mapping[str, Timing], device: torch.device) -> tuple[float, float]:
    """(TFLOP/s of the fastest product, its spread): the spread is p80 over p20 of its times, 1 where all are equal."""
    fastest = min(products.values(), key=lambda timing: timing.p20_ms)
    return PRODUCTS * matmul_tflops(fastest, device), fastest.p80_ms / fastest.p20_ms


@torch.no_grad()  # weights made in inference mode are cached nowhere on a GPU
def rows(options: argparse.Namespace) -> Iterator[harness.Row]:
    """The rows of one record."""
    exact, tower = reference_and_tower(options)
    others = peers(tower, options.peers)
    variants = {"kimivl_lab": tower}
    if options.compiled:
        variants["kimivl_lab, compiled"] = compiled(tower)
    squares = {} if options.quick else products(tower)  # a quick run's few short rounds are no peak
    for case, grids in CASES.items():
        if options.quick and case != "32x32":
            continue
        harness.progress(f"encoder {options.preset} {options.dtype} {case}: checking")
        pixels = noise(grids, options.seed).to(tower.device)
        runs: dict[str, Callable[[], Tensor]] = {
            name: partial(variant, pixels, grids) for name, variant in variants.items()
        }
        runs |= {name: prepare(pixels, grids) for name, prepare in others.items()}
        errors = checked_errors(runs, exact(pixels, grids), TOLERANCE[options.dtype])
        memory = {name: peak_memory_mib(run, tower.device) for name, run in runs.items()}  # with the check: a warm-up
        timings = time_variants(options, case, {**runs, **squares}, warmup=0, on_round=harness.rounds(options))
        flops = sum(tower_flops(tower.config, grids).values())
        peak, spread = peak_of({name: timings[name] for name in squares}, tower.device) if squares else (None, None)
        if peak is not None:  # a tower that is faster than the product shows what the machine reaches
            peak = max(peak, *(flops / timings[name].p50_ms / 1e9 for name in runs))
        for row in variant_rows(case, timings, errors, "transformers"):
            speed, used = flops / row["latency_ms_p50"] / 1e9, memory[row["variant"]]
            yield row | {
                "phase": "forward",
                "patches": len(pixels),
                "speed_tflops": round(speed, 4),
                "matmul_peak_tflops": peak and round(peak, 4),
                "peak_share": peak and round(speed / peak, 4),
                "peak_spread_ratio": spread and round(spread, 3),
                "peak_mem_mib": used and round(used, 1),
            }
        for part, milliseconds in parts(runs["kimivl_lab"]).items():
            yield {
                "case": case,
                "variant": f"kimivl_lab, {part}",
                "phase": "part",
                "patches": len(pixels),
                "latency_ms_p50": round(milliseconds, 3),
                "relative_error": f"{errors['kimivl_lab']:.3g}",
            }


def parts(run: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of one call by kind of operator: of the device where there is a GPU, else of the processor."""
    cuda = torch.cuda.is_available()
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * cuda
    with torch.profiler.profile(activities=activities) as profile:
        run()
        if cuda:
            torch.cuda.synchronize()
    return spent_by_part(profile.events() or [], cuda=cuda)


def spent_by_part(events: Iterable[FunctionEvent], *, cuda: bool) -> dict[str, float]:
    """Milliseconds of the profiler's `events` by part; each kernel or operator counts once.

    An operator's own time belongs to the first part that its name, or that of an operator around it, has a word of. On
    a GPU an operator's time is that of the kernels that it launched itself. Kernels have no part by their own names,
    which say little (nvjet_..., sm90_xmma_...), except those that no operator launched.
    """
    spent = dict.fromkeys((*PARTS, "other"), 0.0)
    unlinked: Counter[str] = Counter()  # microseconds by kernel
    for event in events:
        if event.device_type != DeviceType.CPU:
            if not event.is_user_annotation:
                unlinked[event.name] += event.time_range.elapsed_us()
        elif not cuda:
            spent[_part_of(event)] += event.self_cpu_time_total / 1e3
        else:
            for kernel in event.kernels:
                spent[_part_of(event)] += kernel.duration / 1e3
                unlinked[kernel.name] -= kernel.duration
    for name, microseconds in unlinked.items():
        spent[_part_named(name) or "other"] += max(0.0, microseconds) / 1e3
    return spent


def _part_of(event: FunctionEvent | None) -> str:
    while event is not None:
        if part := _part_named(event.name):
            return part
        event = event.cpu_parent
    return "other"


def _part_named(name: str) -> str | None:
    return next((part for part, words in PARTS.items() if any(word in name.lower() for word in words)), None)


def summary(rows: list[harness.Row]) -> dict[str, Any]:
    """Median times, and our share of the peak."""
    forwards = [row for row in rows if row["phase"] == "forward"]
    return {
        "latency_ms_p50": {f"{row['case']} {row['variant']}": row["latency_ms_p50"] for row in forwards},
        "peak_share": {row["case"]: row["peak_share"] for row in forwards if row["variant"] == "kimivl_lab"},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser(
        "encoder", __doc__, dtypes=TOLERANCE, default=("bfloat16",), preset="kimi-vl-a3b", rounds=(2, 7, 3)
    )
    others = [name for name in PEERS if name != "transformers"]
    parser.add_argument("--peers", nargs="*", choices=others, help="beside transformers (all that are installed)")
    parser.add_argument("--compiled", action="store_true", help="also with compiled blocks (needs a compiler)")
    harness.run_benchmark(parser, COLUMNS, rows, summary, arguments)


if __name__ == "__main__":
    main()
