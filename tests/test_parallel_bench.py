"""The benchmark of ranks: what it times, what it fits, what it sums up."""

import time
from argparse import Namespace
from dataclasses import replace

import pytest
import torch

from kimivl_lab import MoonViTConfig
from kimivl_lab.bench.fit_cost_model import CALIBRATION, collective_points, fit_record, predict
from kimivl_lab.bench.parallel import check, summary
from kimivl_lab.geometry import patch_counts
from kimivl_lab.measure.ranks import RankTiming, run_ranks, time_on_ranks
from kimivl_lab.parallel.balance import QuadraticCost, balance_by_cost
from kimivl_lab.parallel.collectives import all_reduce
from kimivl_lab.parallel.cost_model import assumed_cost_model
from kimivl_lab.parallel.groups import init_group
from kimivl_lab.parallel.work import COLLECTIVES

SLEEP_S = 0.1
CONFIG = MoonViTConfig.preset("tiny")


def time_uneven_ranks() -> dict[str, RankTiming]:
    """One variant whose last rank comes late to an all-reduce, one without work."""
    group = init_group(timeout_s=15)

    def uneven():
        if group.rank() == group.size() - 1:
            time.sleep(SLEEP_S)
        all_reduce(torch.ones(1024), group)

    return time_on_ranks({"uneven": uneven, "idle": lambda: None}, group, torch.device("cpu"), repeats=2)


def test_the_slowest_rank_counts_and_waiting_is_skew():
    first, second = run_ranks(time_uneven_ranks, 2)
    assert first == second
    uneven = first["uneven"]
    assert (uneven.collectives, uneven.bytes) == (1, 4096)
    assert uneven.latency.p50_ms > 1e3 * SLEEP_S
    assert uneven.compute_ms > 1e3 * SLEEP_S > uneven.collective_ms
    assert uneven.skew_ms > 0.9e3 * SLEEP_S
    assert first["idle"].bytes == first["idle"].collectives == 0


def test_every_mode_is_checked_on_every_rank():
    rows = run_ranks(check, 2, Namespace(preset="tiny", dtype="float32", device="cpu", seed=0))[0]
    assert [row["variant"] for row in rows] == ["single", "data", "tensor"]
    assert all(float(row["relative_error"]) < 1e-5 and row["phase"] == "check" for row in rows)


def rows_of(model, ranks=2):
    """A record that `model` would be right about."""
    rows = []
    for kind in COLLECTIVES:
        for size in (4096, 2**20):
            milliseconds = 1e3 * model.links[kind].seconds(kind, ranks, size)
            row = {"case": f"{size}", "variant": kind, "phase": "collective", "collective_bytes": float(size)}
            rows.append({**row, "ranks_count": float(ranks), "latency_ms_p50": milliseconds, "predicted_ms": None})
    rows.append({**rows[0], "latency_ms_p50": 100.0, "predicted_ms": 90.0})  # predicted, so not fitted
    for case, grids in CALIBRATION.items():
        sizes = patch_counts(grids)
        by_rank = balance_by_cost(sizes, ranks, QuadraticCost.of_flops(CONFIG)).by_rank
        for mode in ("single", "data", "tensor"):
            seconds = model.predict(mode, sizes, 1 if mode == "single" else ranks, by_rank).seconds
            row = {"case": case, "variant": mode, "phase": "calibration", "ranks_count": float(ranks)}
            rows.append({**row, "latency_ms_p50": 1e3 * seconds})
    return rows


def test_a_record_gives_its_cost_model_back():
    model = replace(assumed_cost_model(CONFIG, torch.float32), image_s=1e-4, sync_overhead_s=1e-4)
    rows = rows_of(model)
    assert len(collective_points(rows)) == 2 * len(COLLECTIVES)
    fitted = fit_record(rows, "tiny", torch.float32, "made up")
    for mode in ("single", "data", "tensor", "auto"):
        grids = [(24, 24), (6, 8), (12, 12)]
        assert predict(fitted, mode, grids, 2) == pytest.approx(predict(model, mode, grids, 2), rel=0.02)


def test_the_summary_compares_auto_with_the_better_mode():
    times = {"single": 100.0, "data": 90.0, "tensor": 60.0, "auto": 66.0}
    rows = [
        {
            "case": "one",
            "variant": mode,
            "phase": phase,
            "ranks_count": 2,
            "latency_ms_p50": milliseconds,
            "predicted_ms": 1.2 * milliseconds,
            "speedup_ratio": round(100 / milliseconds, 3),
        }
        for phase in ("collective", "sweep")
        for mode, milliseconds in times.items()
    ]
    assert summary(rows)["same_call_over_data"] == {}, "a record without that phase"
    for variant, phase, milliseconds in (
        ("data", "calibration", 50.0),
        ("all_gather", "same_call", 1.0),
        ("same_call", "same_call", 1.5),
    ):
        rows.insert(0, {"case": "one", "variant": variant, "phase": phase, "latency_ms_p50": milliseconds})
    result = summary(rows)
    assert result["same_call_over_data"] == {"one": 0.01}
    assert result["auto_over_best"] == {"one": 1.1}
    assert result["speedup_of_data"] == {"one": 1.111}
    assert result["median_prediction_error"] == {"collective": 0.2, "sweep": 0.2}
