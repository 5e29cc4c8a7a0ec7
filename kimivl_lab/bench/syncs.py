"""Host syncs: how many a forward makes for each historic handling of its metadata, and what one costs.

    python -m kimivl_lab.bench.syncs [--preset kimi-vl-a3b] [--dtype bfloat16] [--quick] [--out DIR] [--device cuda]

Each variant is counted twice: on the pretended device, with a narrow tower of the same depth (a count does not depend
on the width), and on the GPU by torch's debug mode and the profiler. All variants are compared with the float32
reference before any is timed. The cases "short kernel" and "long kernel" launch one kernel many times and read a number
back after every so many launches; the cost of a read is the time beyond the loop without reads, divided by the reads.
On a CPU nothing waits: only the pretended counts and the times are filled in.

Test: tests/test_benchmarks.py, tests/test_tower_syncs.py. Record: syncs__*.csv, from a GPU.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..config import EncoderOptions, MoonViTConfig
from ..geometry import IN_TOKEN_LIMIT, GridLike, patch_counts
from ..lessons.grids_on_device import METADATA_VARIANTS
from ..measure.accuracy import checked_errors
from ..moonvit.model import MoonVitPretrainedModel
from ..syncs.counter import HostSyncCounter, count_host_syncs, on_device
from . import harness
from .compare import time_variants, variant_rows
from .towers import drawn_grids, noise, reference_and_tower

IMAGES = (1, 12)
LAUNCHES = 64
READS = (0, 4, 16, 64)
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}
COLUMNS = harness.columns(
    "images patches syncs_count pretended_syncs_count launches_count "
    "pretended_launches_count to_device_bytes to_host_bytes read_cost_us"
)
_NARROW = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 16}
_OPTIONS = EncoderOptions(rope="complex")  # what compiles itself would be counted as other kernels

Runs = dict[str, Callable[[], Tensor]]


def forwards(tower: MoonVitPretrainedModel, grids: Sequence[GridLike], away: Tensor, seed: int) -> Runs:
    """Each variant over `grids`, which are `away`, on the tower's device, where the variant wants them so."""
    pixels = noise(grids, seed)
    return {
        name: partial(encode, tower, pixels, torch.tensor(grids, device="cpu") if name == "host" else away)
        for name, encode in METADATA_VARIANTS.items()
    }


def pretended_counts(layers: int, images: int) -> dict[str, HostSyncCounter]:
    """Each variant counted on the pretended device."""
    config = MoonViTConfig.preset("tiny", num_hidden_layers=layers, **_NARROW)
    tower = on_device(MoonVitPretrainedModel(config, _OPTIONS).eval(), pretended=True)
    grids: Sequence[GridLike] = [(4, 6)] * images
    runs = forwards(tower, grids, on_device(torch.tensor(grids, device="cpu"), pretended=True), seed=0)
    return {name: count_host_syncs(run, pretended=True) for name, run in runs.items()}


def count_and_time(options: argparse.Namespace) -> Iterator[harness.Row]:
    """Rows of the forwards."""
    exact, tower = reference_and_tower(options, _OPTIONS)
    for images in IMAGES:
        harness.progress(f"syncs: {images} images")
        limit = 64 if options.quick else IN_TOKEN_LIMIT
        grids = drawn_grids("coco_val2017", images, options.seed, in_token_limit=limit)
        runs = forwards(tower, grids, torch.tensor(grids, device=tower.device), options.seed)
        want = forwards(exact, grids, torch.tensor(grids, device=tower.device), options.seed)["host"]()
        errors = checked_errors(runs, want, TOLERANCE[options.dtype])
        pretended = pretended_counts(tower.config.num_hidden_layers, images)
        counted = {name: count_host_syncs(run) for name, run in runs.items()} if tower.device.type == "cuda" else {}
        case = f"{images} of coco_val2017"
        for row in variant_rows(case, time_variants(options, case, runs), errors, "per_layer"):
            name = row["variant"]
            row |= {
                "images": images,
                "patches": sum(patch_counts(grids)),
                "pretended_syncs_count": pretended[name].total,
                "pretended_launches_count": pretended[name].launches,
            }
            if name in counted:
                row |= {
                    "syncs_count": counted[name].total,
                    "launches_count": counted[name].launches,
                    "to_device_bytes": counted[name].bytes_to_device,
                    "to_host_bytes": counted[name].bytes_to_host,
                }
            yield row


def loops(device: torch.device, quick: bool) -> dict[str, dict[int, Callable[[], Tensor]]]:
    """By kernel and by number of reads: `LAUNCHES` launches of the kernel."""
    size = 4096 if device.type == "cuda" else 128 if quick else 512
    x, product = torch.ones(1024, device=device), torch.empty(size, size, device=device)
    factor, added = torch.ones(size, size, device=device), torch.empty_like(x)
    number = torch.zeros((), device=device)
    kernels = {
        "short kernel": partial(torch.add, x, 1, out=added),
        "long kernel": partial(torch.mm, factor, factor, out=product),
    }

    def loop(launch: Callable[[], Tensor], reads: int) -> Tensor:
        for done in range(1, LAUNCHES + 1):
            result = launch()
            if reads and done % (LAUNCHES // reads) == 0:
                number.item()
        return result

    return {name: {reads: partial(loop, kernel, reads) for reads in READS} for name, kernel in kernels.items()}


def price(options: argparse.Namespace) -> Iterator[harness.Row]:
    """Rows of the loops."""
    for kernel, runs in loops(torch.device(options.device), options.quick).items():
        harness.progress(f"syncs: {kernel}")
        variants = {f"{reads} reads of {LAUNCHES} launches": run for reads, run in runs.items()}
        errors = checked_errors(variants, runs[0](), 0.0)
        timings, free = time_variants(options, kernel, variants), f"0 reads of {LAUNCHES} launches"
        for row, reads in zip(variant_rows(kernel, timings, errors, free), READS, strict=True):
            added = max(0.0, row["latency_ms_p50"] - timings[free].p50_ms)
            yield row | {"read_cost_us": round(added / reads * 1e3, 3) if reads else None}


@torch.no_grad()  # weights made in inference mode are cached nowhere on a GPU
def rows(options: argparse.Namespace) -> Iterator[harness.Row]:
    """The rows of one record."""
    yield from count_and_time(options)
    yield from price(options)


def summary(rows: list[harness.Row]) -> dict[str, Any]:
    """Counts and times of the forwards, and the price of one read."""
    forwards = {f"{row['case']} {row['variant']}": row for row in rows if row["case"].endswith("coco_val2017")}
    reads = {f"{row['case']}, {row['variant']}": row["read_cost_us"] for row in rows if row.get("read_cost_us")}
    return {
        "syncs": {name: row.get("syncs_count") for name, row in forwards.items()},
        "pretended": {name: row["pretended_syncs_count"] for name, row in forwards.items()},
        "latency_ms_p50": {name: row["latency_ms_p50"] for name, row in forwards.items()},
        "read_cost_us": reads,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    cuda = torch.cuda.is_available()
    parser = harness.parser(
        "syncs",
        __doc__,
        dtypes=TOLERANCE,
        default=("bfloat16",) if cuda else ("float32",),
        preset="kimi-vl-a3b" if cuda else "lab",
        rounds=(1, 9, 3),
    )
    harness.run_benchmark(parser, COLUMNS, rows, summary, arguments)


if __name__ == "__main__":
    main()
