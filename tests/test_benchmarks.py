"""Benchmarks: they check before they time, keep what they measured, and survive each other's failures."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kimivl_lab.bench import gpu_suite
from kimivl_lab.bench.compare import COLUMNS, Comparison
from kimivl_lab.bench.gpu_suite import Step, run_steps
from kimivl_lab.bench.ladder import encode, rungs
from kimivl_lab.bench.peers import peers
from kimivl_lab.bench.position_cache import policies, simulate, traffic
from kimivl_lab.measure.records import Recorder, record_problems
from kimivl_lab.moonvit.position_cache import PositionCache
from tests.conftest import MIXED_GRIDS, pixels_for, relative_error, tiny_tower

MODULES = sorted(path.stem for path in Path(gpu_suite.__file__).parent.glob("*.py") if "__main__" in path.read_text())


def suite_options(tmp_path, **changes):
    defaults = {"budget": 200.0, "out": tmp_path, "device": "cpu", "seed": 0, "quick": True, "preset": "tiny"}
    return argparse.Namespace(**{**defaults, **changes})


def test_gpu_suite_dry_run_writes_valid_records(tmp_path):
    dry = ("attention", "rope", "upload", "metadata", "syncs, bfloat16", "encoder, float32", "graphs, bfloat16")
    results = run_steps([step for step in gpu_suite.STEPS if step.name in dry], suite_options(tmp_path))
    modules = ["attention", "rope", "upload", "metadata", "syncs", "encoder", "graphs"]
    assert [result.get("benchmark") for result in results.values()] == modules, results
    records = sorted(tmp_path.glob("*.csv"))
    assert len(records) == len(modules) + 1, "rope writes one a dtype"
    assert [problem for path in records for problem in record_problems(path)] == []


def test_gpu_suite_survives_a_failing_step_and_names_the_skipped(tmp_path):
    steps = [Step("broken", "no_such_module", 1), Step("long", "upload", 10_000), Step("after", "upload", 1)]
    results = run_steps(steps, suite_options(tmp_path, quick=False, budget=100.0))
    assert results["broken"]["failed"] == "exit code 1"
    assert "expects 10000 s" in results["long"]["skipped"]
    assert results["after"]["benchmark"] == "upload"


@pytest.mark.parametrize("module", MODULES)
def test_every_benchmark_has_help(module):
    done = subprocess.run(
        [sys.executable, "-m", f"kimivl_lab.bench.{module}", "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "--quick" in done.stdout


def test_a_wrong_variant_is_never_timed(tmp_path):
    with Recorder("position", "float32", COLUMNS, directory=tmp_path) as record:
        comparison = Comparison(record, "right", 10.0, 1e-6, "cpu", 0, 1)
        one = torch.ones(3)
        with pytest.raises(AssertionError, match="wrong is off by"):
            comparison.add("case", {"right": lambda: one, "wrong": lambda: 2 * one}, one, patches=3, bytes_moved=12)
    assert record.rows == []


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)], ids=str)
@torch.no_grad()
def test_every_rung_of_the_ladder_is_the_same_encoder(dtype, tolerance):
    pixels = pixels_for(MIXED_GRIDS)
    want = tiny_tower(seed=5).double()(pixels.double(), MIXED_GRIDS)
    tower = tiny_tower(seed=5).to(dtype)
    climbed = rungs(tower.device, dtype)
    assert len({rung.name for rung in climbed}) == len(climbed) >= 7
    assert dtype == torch.bfloat16 or not any("amx" in (rung.linear, rung.attention, rung.rope) for rung in climbed)
    for rung in climbed:
        assert relative_error(encode(tower, pixels, torch.tensor(MIXED_GRIDS), rung), want) < tolerance, rung.name


@torch.no_grad()
def test_peers_hold_the_same_weights():
    tower, pixels = tiny_tower(seed=6), pixels_for(MIXED_GRIDS)
    want = tower(pixels, MIXED_GRIDS)
    for name, prepare in peers(tower).items():
        assert relative_error(prepare(pixels, MIXED_GRIDS)(), want) < 1e-5, name


def test_cache_simulation_counts_what_a_real_cache_would():
    grids = [(2, 2), (4, 4), (2, 2), (6, 6), (4, 4), (2, 2)]
    result = simulate(PositionCache(max_bytes=None, max_entries=2, policy="fifo"), grids, hit_us=1.0, miss_us=10.0)
    assert result["hit_rate"] == round(2 / 6, 4)  # the second 2x2 and the second 4x4
    assert result["evictions_count"] == 2
    assert result["time_per_image_ms"] == round((4 * 10 + 16 * 10 + 4 + 36 * 10 + 16 + 4 * 10) / 1e3 / 6, 4)
    assert len(list(policies())) == 23
    cyclic = list(traffic("cyclic", 700, seed=0))
    assert len(set(cyclic)) == 300 and cyclic[:300] == cyclic[300:600]
