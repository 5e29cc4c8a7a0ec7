"""The cost model of a record of `bench.parallel`, and what it predicts for a batch as that benchmark runs it."""

from collections.abc import Iterable
from typing import Any

import torch

from ..config import MoonViTConfig
from ..geometry import Grid, patch_counts
from ..parallel.balance import QuadraticCost, balance_by_cost
from ..parallel.collectives_model import CollectivePoint
from ..parallel.cost_model import CALIBRATION_GRIDS, CostModel, MeasuredPoint

Row = dict[str, Any]

CALIBRATION: dict[str, list[Grid]] = {f"batch {n}": list(grids) for n, grids in enumerate(CALIBRATION_GRIDS, start=1)}


def predict(model: CostModel, mode: str, grids: list[Grid], ranks: int) -> float:
    """Seconds of a batch as this benchmark runs it."""
    sizes = patch_counts(grids)
    mode = model.choose(sizes, ranks) if mode == "auto" else mode
    return model.predict(mode, sizes, 1 if mode == "single" else ranks).seconds


def collective_points(rows: Iterable[Row]) -> list[CollectivePoint]:
    """Measured collectives, without those that were predicted."""
    return [
        CollectivePoint(
            row["variant"], int(row["ranks_count"]), int(row["collective_bytes"]), row["latency_ms_p50"] / 1e3
        )
        for row in rows
        if row["phase"] == "collective" and row.get("predicted_ms") is None
    ]


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
    return CostModel.fit(config, dtype, points, collective_points(rows), source=source)
