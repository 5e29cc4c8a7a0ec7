"""The cost model of a machine, fitted to measured forwards and collectives.

`fit_record` takes them from a record of `bench.parallel`, `fit_cost_model` from any list of points.

Test: tests/test_cost_model.py, tests/test_parallel_bench.py. Record: parallel__*.csv.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import torch

from ..config import MoonViTConfig
from ..geometry import GridLike, patch_counts
from ..parallel.balance import QuadraticCost, balance_by_cost
from ..parallel.cost_model import RATES, CostModel, LinkCost
from ..parallel.work import TowerWork, steps_and_bytes
from .harness import Row

# One image and many, small and large: measured in every mode, these batches tell the rates apart.
CALIBRATION_GRIDS: tuple[tuple[GridLike, ...], ...] = (
    ((8, 8),),
    ((16, 16),),
    ((32, 32),),
    ((48, 48),),
    ((64, 64),),
    ((8, 8),) * 32,
    ((16, 16),) * 8,
    ((32, 32),) * 4,
    ((64, 64), (16, 16), (16, 16)),
)
CALIBRATION: dict[str, Sequence[GridLike]] = {
    f"batch {n}": list(grids) for n, grids in enumerate(CALIBRATION_GRIDS, start=1)
}
_FIT_ROUNDS = 5


@dataclass(frozen=True)
class MeasuredPoint:
    """One measured forward of a batch.

    Attributes:
        mode: "single", "data" or "tensor".
        sizes: patches of each image, in the order of the batch.
        ranks: world size; 1 for "single".
        seconds: until the slowest rank has the features of all images (median of repeats).
        by_rank: of mode "data", the images of each rank (`Assignment.by_rank`); None: as `balance_by_cost` places them.
    """

    mode: str
    sizes: Sequence[int]
    ranks: int
    seconds: float
    by_rank: Sequence[Sequence[int]] | None = None


@dataclass(frozen=True)
class CollectivePoint:
    """One measured collective.

    Attributes:
        kind: "all_reduce", "all_gather" or "broadcast".
        ranks: world size.
        bytes: of the tensor that it leaves on every rank, as `collectives.Collective` counts them.
        seconds: until the last rank has the result (median of repeats).
    """

    kind: str
    ranks: int
    bytes: int
    seconds: float


def fit_cost_model(
    config: MoonViTConfig,
    dtype: torch.dtype,
    points: Sequence[MeasuredPoint],
    collectives: Sequence[CollectivePoint] = (),
    *,
    source: str,
) -> CostModel:
    """The model closest to measured forwards, by relative least squares; collectives are fitted first, alone.

    Args:
        points: forwards of one machine, of `CALIBRATION_GRIDS` at least: batches that are alike cannot tell the
            rates apart, and only tensor parallel tells `patch_s` from the linear layers.
        collectives: of each kind that the points' forwards run, over the sizes they run.
        source: device and date, in words for a plot.

    Raises:
        ValueError: no points, or one that `CostModel.predict` refuses.
    """
    if not points:
        raise ValueError("a fit needs measured points, got none")
    ranks, work = tuple(sorted({point.ranks for point in points})), TowerWork.of(config, dtype)
    model = CostModel(work, 0.0, 0.0, 0.0, 1e-9, 1e-9, 0.0, fit_links(collectives), source, ranks)
    for _ in range(_FIT_ROUNDS):  # which rank is slowest depends on the rates
        terms = [model.terms(point.mode, point.sizes, point.ranks, point.by_rank) for point in points]
        *rates, sync_overhead_s = fit_nonnegative(
            [(*amounts, collectives) for amounts, collectives, _ in terms],
            [point.seconds for point in points],
            [links for *_, links in terms],
        )
        model = replace(model, **dict(zip(RATES, rates, strict=True)), sync_overhead_s=sync_overhead_s)
    return model


def fit_links(points: Iterable[CollectivePoint]) -> dict[str, LinkCost]:
    """alpha and beta of every kind among the points, by relative least squares."""
    by_kind: dict[str, list[CollectivePoint]] = {}
    for point in points:
        by_kind.setdefault(point.kind, []).append(point)
    return {
        kind: LinkCost(
            *fit_nonnegative(
                [steps_and_bytes(kind, point.ranks, point.bytes) for point in group],
                [point.seconds for point in group],
            )
        )
        for kind, group in by_kind.items()
    }


def prediction_errors(model: CostModel, points: Sequence[MeasuredPoint]) -> list[float]:
    """Predicted over measured seconds of each point, less 1: 0.1 is predicted 10 % too slow."""
    predicted = [model.predict(point.mode, point.sizes, point.ranks, point.by_rank) for point in points]
    return [one.seconds / point.seconds - 1 for one, point in zip(predicted, points, strict=True)]


def fit_record(rows: list[Row], preset: str, dtype: torch.dtype, source: str) -> CostModel:
    """The cost model of a record, from its phases "collective" and "calibration".

    Args:
        rows: as `read_record` gives them.
        source: device and date, in words for a plot.
    """
    config = MoonViTConfig.preset(preset)
    points = []
    for row in rows:
        if row["phase"] == "calibration":
            mode, sizes = row["variant"], patch_counts(CALIBRATION[row["case"]])
            ranks = 1 if mode == "single" else int(row["ranks_count"])
            by_rank = balance_by_cost(sizes, ranks, QuadraticCost.of_flops(config)).by_rank
            points.append(MeasuredPoint(mode, sizes, ranks, row["latency_ms_p50"] / 1e3, by_rank))
    return fit_cost_model(config, dtype, points, collective_points(rows), source=source)


def collective_points(rows: Iterable[Row]) -> list[CollectivePoint]:
    """Measured collectives of a record, without those that were predicted."""
    return [
        CollectivePoint(
            row["variant"], int(row["ranks_count"]), int(row["collective_bytes"]), row["latency_ms_p50"] / 1e3
        )
        for row in rows
        if row["phase"] == "collective" and row.get("predicted_ms") is None
    ]


def predict(model: CostModel, mode: str, grids: Sequence[GridLike], ranks: int) -> float:
    """Seconds of a batch as `bench.parallel` runs it."""
    sizes = patch_counts(grids)
    mode = model.choose(sizes, ranks) if mode == "auto" else mode
    return model.predict(mode, sizes, 1 if mode == "single" else ranks).seconds


def fit_nonnegative(
    features: Sequence[Sequence[float]], values: Sequence[float], known: Sequence[float] | float = 0.0
) -> list[float]:
    """Coefficients x >= 0 that minimise the sum of ((known + features x - values) / values)^2.

    A time of a millisecond counts as much as one of a second. Exact: the best of the least-squares solutions over every
    subset of the columns, so for few columns only.

    Args:
        features: one row a value, one column a coefficient.
        values: positive.
        known: the part of each value that is explained already.

    Raises:
        ValueError: no values, or one that is not positive.
    """
    wanted = np.asarray(values, dtype=np.float64)
    if not wanted.size or not (wanted > 0).all():
        raise ValueError(f"a fit needs measured values, all positive, got {list(values)!r:.100}")
    rows = np.asarray(features, dtype=np.float64) / wanted[:, None]
    target = 1 - np.asarray(known) / wanted
    scale = np.abs(rows).max(axis=0)  # columns differ by many powers of ten
    used = np.flatnonzero(scale)
    best, solution = float((target**2).sum()), np.zeros(len(scale))
    for count in range(1, len(used) + 1):
        for columns in map(list, combinations(used, count)):
            scaled = rows[:, columns] / scale[columns]
            found = np.linalg.lstsq(scaled, target, rcond=None)[0]
            squares = float(((scaled @ found - target) ** 2).sum())
            if (found >= 0).all() and squares < best:
                best, solution = squares, np.zeros(len(scale))
                solution[columns] = found / scale[columns]
    return solution.tolist()
