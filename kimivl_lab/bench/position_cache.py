"""Cache policies on real traffic: hit rate, bytes and time for each image, without allocating the bytes.

    python -m kimivl_lab.bench.position_cache [--quick] [--out DIR]

The benchmark drives the library's own `PositionCache` with tensors that have the true sizes (bfloat16, 1152 wide) but
no storage, so a bound of 4 GiB needs no 4 GiB. The traffic is independent draws from each size distribution, and two
more: "hot_cold" takes four draws in five from eight photo sizes and one from the clip art's; "cyclic" repeats 300 grids
of charts in order. The time for an image weights hits and misses by their cost a patch, which is measured first.

Test: tests/test_benchmarks.py. Record: position_cache__*.csv.
"""

import argparse
import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ..config import MoonViTConfig
from ..datasets import draw_sizes, load_sizes
from ..geometry import GridLike, image_geometry, num_patches
from ..measure.accuracy import checked_errors
from ..moonvit.position_cache import PositionCache
from . import harness
from .compare import time_variants
from .position import TOLERANCE, cached, full_size_table

WORKLOADS = ("coco_val2017", "pew_charts", "receipts", "device_screens", "clipart")
ENTRIES = (16, 32, 64, 128, 256, 512, 1024)
MEBIBYTES = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
TIMED_GRID: GridLike = (36, 46)
COLUMNS = (
    "case",
    "variant",
    "policy",
    "bound_entries",
    "bound_mib",
    "images",
    "hit_rate",
    "largest_mib",
    "evictions_count",
    "time_per_image_ms",
    "relative_error",
)


def traffic(case: str, images: int, seed: int) -> Iterator[GridLike]:
    """`images` grids in the order they arrive."""
    if case == "hot_cold":
        choose = random.Random(seed)
        hot, cold = draw_sizes("coco_val2017", 8, seed), iter(draw_sizes("clipart", images, seed))
        sizes = [choose.choice(hot) if choose.random() < 0.8 else next(cold) for _ in range(images)]
    elif case == "cyclic":
        distinct = {image_geometry(width, height).grid_hw for width, height, _ in load_sizes("pew_charts")}
        chosen = random.Random(seed).sample(sorted(distinct), 300)
        yield from (chosen[index % len(chosen)] for index in range(images))
        return
    else:
        sizes = draw_sizes(case, images, seed)
    for width, height in sizes:
        try:
            yield image_geometry(width, height).grid_hw
        except ValueError:  # a clip-art size too long for any grid never reaches the encoder
            continue


@torch.no_grad()
def costs(options: argparse.Namespace) -> dict[str, float]:
    """Measured first, in bfloat16: microseconds a patch of a hit and of a miss, and the miss's relative error."""
    module, exact = full_size_table(torch.bfloat16, "cpu", options.seed)
    grids = [TIMED_GRID]
    runs = {way: partial(cached, module, grids, cold=way == "miss") for way in ("miss", "hit")}
    errors = checked_errors(runs, exact.get_pos_embeds(grids), TOLERANCE["bfloat16"])
    timings = time_variants(options, "costs", runs)
    hit, miss = (round(1e3 * timings[name].p50_ms / num_patches(TIMED_GRID), 4) for name in ("hit", "miss"))
    return {"hit_us_per_patch": hit, "miss_us_per_patch": miss, "relative_error": float(f"{errors['miss']:.3g}")}


def simulate(cache: PositionCache, grids: Sequence[GridLike], hit_us: float, miss_us: float) -> dict[str, float]:
    """Looks every grid up in turn."""
    dim = MoonViTConfig.preset("kimi-vl-a3b").hidden_size
    largest, time_us = 0, 0.0
    for grid in grids:
        misses = cache.stats.misses
        cache.get(grid, lambda grid=grid: torch.empty(num_patches(grid), dim, dtype=torch.bfloat16, device="meta"))
        largest = max(largest, cache.stats.bytes)
        time_us += num_patches(grid) * (miss_us if cache.stats.misses > misses else hit_us)
    return {
        "images": len(grids),
        "hit_rate": round(cache.stats.hit_rate, 4),
        "largest_mib": round(largest / 2**20, 2),
        "evictions_count": cache.stats.evictions,
        "time_per_image_ms": round(time_us / 1e3 / len(grids), 4),
    }


def policies() -> Iterator[tuple[dict[str, Any], PositionCache]]:
    """Every policy and size that is compared, with its columns of the record."""
    for entries in ENTRIES:
        for policy in ("fifo", "lru"):
            row: dict[str, Any] = {"variant": f"{policy} by entries", "policy": policy, "bound_entries": entries}
            yield row, PositionCache(max_bytes=None, max_entries=entries, policy=policy)
    for mib in MEBIBYTES:
        yield {"variant": "lru by bytes", "policy": "lru", "bound_mib": mib}, PositionCache(max_bytes=mib * 2**20)


def rows(options: argparse.Namespace) -> Iterator[harness.Row]:
    """The rows of one record."""
    for case in (*WORKLOADS, "hot_cold", "cyclic"):
        harness.progress(f"position_cache {case}")
        grids = list(traffic(case, 2_000 if options.quick else 20_000, options.seed))
        for row, cache in policies():
            result = simulate(cache, grids, options.hit_us_per_patch, options.miss_us_per_patch)
            yield {"case": case, "relative_error": options.relative_error, **row, **result}


def summary(rows: list[harness.Row]) -> dict[str, Any]:
    """The hit rates of SGLang's policy (256 entries, first in first out) and of the default."""
    rates: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["variant"] == "fifo by entries" and row["bound_entries"] == 256:
            rates.setdefault(row["case"], {})["fifo_256_entries"] = row["hit_rate"]
        if row.get("bound_mib") == 256:
            rates.setdefault(row["case"], {})["lru_256_mib"] = row["hit_rate"]
    return {"hit_rates": rates}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser("position_cache", __doc__, dtypes=("bfloat16",), rounds=(2, 15, 15), on_host=True)
    harness.run_benchmark(parser, COLUMNS, rows, summary, arguments, yardsticks=costs)


if __name__ == "__main__":
    main()
