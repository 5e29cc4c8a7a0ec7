"""The pattern of every operator benchmark: check all variants of a case, time them, give a row for each variant.

Test: tests/test_benchmarks.py.
"""

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from ..measure.accuracy import checked_errors
from ..measure.roofline import copy_gbps_of, floor_ms
from ..measure.timing import Timing, time_interleaved
from .harness import Row, columns, progress

COLUMNS = columns("patches floor_ms floor_gbps")


def compare(
    options: argparse.Namespace,
    case: str,
    runs: Mapping[str, Callable[[], Tensor]],
    want: Tensor,
    *,
    baseline: str,
    tolerance: float,
    patches: int,
    bytes_moved: int | Mapping[str, int],
    gbps: float | None = None,
    checks: Mapping[str, Callable[[], Tensor]] | None = None,
    device: str | None = None,
) -> Iterator[Row]:
    """Compares every variant with `want`, then times all of them in random order; one row for each variant.

    Args:
        options: of `run_benchmark`.
        runs: variant -> what is timed.
        baseline: the variant that speed-ups are over.
        tolerance: the largest relative error that is timed; above it AssertionError, and nothing is timed.
        bytes_moved: the fewest bytes that any implementation moves, or one number for each variant.
        gbps: the rate of the floor, column `floor_gbps`; `floor_ms` is the time to move those bytes at it. None: the
            rate of a copy of as many bytes, which a cache may hold (`copy_gbps_of`).
        checks: variant -> what is compared with `want`, where it is not what is timed.
        device: whose clock times; None: the options'.
    """
    progress(f"{options.benchmark} {options.dtype} {case}")
    errors = checked_errors(checks or runs, want, tolerance)
    timings = time_variants(options, case, runs, device=device or options.device)
    rates: dict[int, float] = {}
    for row in variant_rows(case, timings, errors, baseline):
        least = bytes_moved if isinstance(bytes_moved, int) else bytes_moved[row["variant"]]
        rate = rates.get(least) or rates.setdefault(least, gbps or copy_gbps_of(least, device or options.device))
        yield row | {"patches": patches, "floor_ms": round(floor_ms(least, rate), 4), "floor_gbps": round(rate, 2)}


def time_variants(
    options: argparse.Namespace, case: str, runs: Mapping[str, Callable[[], object]], **more: Any
) -> dict[str, Timing]:
    """`time_interleaved` with the options' device and rounds, in orders drawn for this case; `more` replaces these."""
    given: dict[str, Any] = {"device": options.device, "warmup": options.warmup, "repeats": options.repeats}
    given["seed"] = f"{options.seed} {case}"
    return time_interleaved(runs, **(given | more))


def variant_rows(case: str, timings: Mapping[str, Timing], errors: Mapping[str, float], baseline: str) -> Iterator[Row]:
    """What every record of times holds, one row for each variant of `errors`; speed-ups are over `baseline`."""
    for name, error in errors.items():
        yield {
            "case": case,
            "variant": name,
            "speedup_ratio": round(timings[baseline].p50_ms / timings[name].p50_ms, 3),
            "relative_error": f"{error:.3g}",
            **timings[name].row(),
        }


def geometric_means(rows: Iterable[Row]) -> dict[str, float]:
    """Speed-up of each variant over the baseline, all cases together: ratios 2 and 8 give 4."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        ratios.setdefault(row["variant"], []).append(row["speedup_ratio"])
    return {name: round(math.exp(sum(map(math.log, values)) / len(values)), 2) for name, values in ratios.items()}


def mean_speedups(rows: list[Row]) -> dict[str, dict[str, float]]:
    """The summary of a benchmark of one operator."""
    return {"geometric_mean_speedup": geometric_means(rows)}
