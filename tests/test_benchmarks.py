"""Benchmarks: they check before they time, keep what they measured, and survive each other's failures."""

import argparse
import importlib
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from kimivl_lab.bench import (
    attention,
    encoder,
    gpu_suite,
    graphs,
    harness,
    host,
    ladder,
    linear,
    metadata,
    position,
    position_cache,
    preprocess,
    rope,
    syncs,
    upload,
)
from kimivl_lab.bench import compare as compare_module
from kimivl_lab.bench.compare import compare
from kimivl_lab.bench.gpu_suite import ENGINE, STEPS, TESTS
from kimivl_lab.bench.ladder import encode, rungs
from kimivl_lab.bench.peers import peers
from kimivl_lab.bench.position_cache import policies, simulate, traffic
from kimivl_lab.bench.towers import noise
from kimivl_lab.measure import roofline
from kimivl_lab.measure.records import read_record, record_problems
from kimivl_lab.measure.roofline import copy_gbps, copy_gbps_of, copy_mib, matmul
from kimivl_lab.measure.timing import Timing
from kimivl_lab.moonvit.model import MoonVitPretrainedModel
from kimivl_lab.moonvit.position_cache import PositionCache
from tests.conftest import MIXED_GRIDS, pixels_for, relative_error, tiny_tower

MODULES = sorted(path.stem for path in Path(gpu_suite.__file__).parent.glob("*.py") if "__main__" in path.read_text())


def program(module):
    return importlib.import_module(f"kimivl_lab.bench.{module}").main


def suite_options(tmp_path, **changes):
    defaults = {"budget": 200.0, "out": tmp_path, "device": "cpu", "seed": 0, "quick": True, "preset": "tiny"}
    return argparse.Namespace(**{**defaults, **changes})


@pytest.mark.parametrize("module", MODULES)
def test_every_benchmark_has_help(module, capsys):
    with pytest.raises(SystemExit) as ended:
        program(module)(["--help"])
    assert ended.value.code == 0
    assert f"kimivl_lab.bench.{module} " in (text := capsys.readouterr().out) and "--quick" in text


@pytest.fixture
def small(monkeypatch):
    """Every benchmark on a few patches: what is checked and written is the same."""
    grids = [(4, 6), (8, 2)]
    for module in (attention, rope, metadata, position):
        monkeypatch.setattr(module, "cases", lambda quick, seed: {"4x6": grids[:1], "2 mixed": grids})
    monkeypatch.setattr(encoder, "CASES", {"32x32": grids})
    monkeypatch.setattr(ladder, "batches", lambda quick, seed: {"2": (noise(grids, seed), torch.tensor(grids))})
    monkeypatch.setattr(upload, "PATCHES", (4, 8))
    monkeypatch.setattr(graphs, "DEPTHS", (1, 2))
    monkeypatch.setattr(graphs, "QUICK_BUDGETS", (4, 9))
    monkeypatch.setattr(syncs, "IMAGES", (1, 2))
    monkeypatch.setitem(host.NARROW, "num_hidden_layers", 2)
    for module in (harness, upload):
        monkeypatch.setattr(module, "copy_gbps", partial(copy_gbps, mib=1))
    prepare = MoonVitPretrainedModel.prepare_encoder_metadata

    def prepare_by_cache(tower, *arguments, **more):
        made_in_inference_mode = any(weight.is_inference() for weight in tower.parameters())
        assert not made_in_inference_mode, "on a GPU nothing would be cached of such weights"
        return prepare(tower, *arguments, **more)

    monkeypatch.setattr(MoonVitPretrainedModel, "prepare_encoder_metadata", prepare_by_cache)
    monkeypatch.setattr("gc.collect", lambda: 0)  # before each peak of memory: slow amid all that a test run imported


def written(module, arguments, folder, capsys):
    """Runs a benchmark in this process; the rows of its records, all valid and with provenance."""
    program(module)(arguments)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    records = sorted(folder.glob("*.csv"))
    assert (result["benchmark"], len(result["results"])) == (module, len(records)) and records
    for path in records:
        _, origin = read_record(path)
        assert origin["finished"] and (origin["seed"], origin["order"][:6]) == (0, "random")
    rows = [row for path in records for row in read_record(path)[0]]
    return rows, [one for path in records for one in record_problems(path)]


RECORDING = [step for step in STEPS if step.module not in (TESTS, ENGINE, "gpu_checks", "parallel")]


@pytest.mark.parametrize("step", RECORDING, ids=lambda step: step.name)
def test_every_step_of_the_gpu_suite_writes_valid_records(step, small, tmp_path, capsys):
    """What the suite's processes do on a GPU, here on the CPU in this process, with the tiny preset, not compiled."""
    arguments = gpu_suite.arguments_of(step, suite_options(tmp_path))
    rows, problems = written(step.module, [one for one in arguments if one != "--compiled"], tmp_path, capsys)
    assert rows and problems == []


def test_benchmarks_of_the_host_write_valid_records(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(position_cache, "WORKLOADS", ("clipart",))
    monkeypatch.setattr(position_cache, "TIMED_GRID", (4, 6))
    images = [Image.new("RGB", (60, 40), "green"), Image.new("RGB", (28, 90), "red")]
    monkeypatch.setattr(preprocess, "photographs", lambda workload, count, seed: images)
    monkeypatch.setattr(harness, "copy_gbps", partial(copy_gbps, mib=1))
    monkeypatch.setattr(linear, "ROWS", (3, 8, 8, 4))
    for module in ("position_cache", "preprocess", "linear"):
        rows, problems = written(module, ["--quick", "--out", str(tmp_path / module)], tmp_path / module, capsys)
        assert rows and problems == []


def test_a_full_encoder_run_measures_its_peak_in_the_same_rounds(small, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(encoder, "matmul", partial(matmul, size=32))
    arguments = ["--preset", "tiny", "--dtype", "float32", "--repeats", "2", "--device", "cpu", "--out", str(tmp_path)]
    rows, _ = written("encoder", arguments, tmp_path, capsys)
    for row in (row for row in rows if row["phase"] == "forward"):
        assert row["peak_share"] == pytest.approx(row["speed_tflops"] / row["matmul_peak_tflops"], abs=2e-4, rel=0.5)
        assert row["peak_spread_ratio"] >= 1


def test_the_product_that_bounds_a_run_is_the_fastest_that_runs_here(monkeypatch):
    seconds = {"torch": 3.0, "packed": 1.0, "third": 2.0}
    clock = iter([at for name in seconds for _ in range(4) for at in (0.0, seconds[name])])
    monkeypatch.setattr(roofline.time, "perf_counter", lambda: next(clock))
    assert roofline._fastest([lambda name=name: name for name in seconds])() == "packed"


def event(name, *, parent=None, kernels=(), device="CPU", end=0, annotation=False):
    """One of torch's profiler events, as it makes them: an operator with the kernels linked to it, or a kernel."""
    made = FunctionEvent(
        1, name, 1, 0, end, use_device="cuda", device_type=getattr(DeviceType, device), is_user_annotation=annotation
    )
    made.cpu_parent = parent
    for kernel, microseconds in kernels:
        made.append_kernel(kernel, 0, microseconds)
    return made


def test_a_kernels_time_is_counted_once_and_belongs_to_the_operator_that_launched_it():
    """Each kernel is in the events twice: in its operator's `kernels`, and as an event of the device."""
    linear = event("aten::linear")
    operators = [
        linear,
        event("aten::addmm", parent=linear, kernels=[("nvjet_tst_128x256_v_bz", 1000), ("cublasLt splitKreduce", 200)]),
        event("aten::empty", parent=linear, kernels=[("vectorized_fill", 50)]),
        event("torch_attn::_varlen_attn", kernels=[("flash_fwd_kernel_add", 700)]),
        event("triton_poi_fused_cat_mul_sub_0", kernels=[("triton_poi_fused_cat_mul_sub_0", 300)]),
        event("aten::add", kernels=[("elementwise_kernel", 90), ("elementwise_kernel", 10)]),
        event("cudaDeviceSynchronize"),
    ]
    on_device = [
        event(kernel.name, device="CUDA", end=kernel.duration) for operator in operators for kernel in operator.kernels
    ]
    of_a_graph = [event("elementwise_kernel", device="CUDA", end=40), event("layer_norm_kernel", device="CUDA", end=60)]
    annotation = event("ProfilerStep", device="CUDA", end=9000, annotation=True)
    spent = encoder.spent_by_part([*operators, *on_device, *of_a_graph, annotation], cuda=True)
    assert spent == pytest.approx(
        dict.fromkeys(spent, 0.0)
        | {"linear": 1.25, "attention": 0.7, "rope": 0.3, "multiply and add": 0.1, "norm": 0.06, "other": 0.04}
    )
    assert sum(spent.values()) == pytest.approx(
        sum(one.time_range.elapsed_us() for one in on_device + of_a_graph) / 1e3
    )


def test_on_a_cpu_every_operators_own_time_is_counted_once():
    def run():
        return torch.nn.functional.gelu(torch.nn.functional.linear(torch.ones(64, 64), torch.ones(64, 64)))

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    spent = encoder.spent_by_part(profile.events(), cuda=False)
    assert sum(spent.values()) == pytest.approx(sum(one.self_cpu_time_total for one in profile.events()) / 1e3)
    assert spent["linear"] > 0 and spent["activation"] > 0


def test_the_floor_is_the_rate_of_a_copy_of_as_many_bytes(monkeypatch):
    """A small working set stays in a cache: its roof is not the memory's."""
    options = argparse.Namespace(benchmark="rope", dtype="float32", device="cpu", seed=0, warmup=0, repeats=1)
    measured = []
    monkeypatch.setattr(compare_module, "copy_gbps_of", lambda count, device: measured.append(count) or count / 1e6)
    one = torch.ones(3)
    runs = {"right": lambda: one, "also": lambda: one.clone(), "third": lambda: one + 0}
    rows_of = partial(compare, options, "case", runs, one, baseline="right", tolerance=1e-6, patches=3)
    moved = {"right": 20_000_000, "also": 80_000_000, "third": 20_000_000}
    rows = {row["variant"]: row for row in rows_of(bytes_moved=moved)}
    assert measured == [20_000_000, 80_000_000], "each size once"
    assert {name: row["floor_gbps"] for name, row in rows.items()} == {"right": 20.0, "also": 80.0, "third": 20.0}
    assert {row["floor_ms"] for row in rows.values()} == {1.0}
    (row, *_) = rows_of(bytes_moved=8_000_000, gbps=8.0)
    assert (row["floor_ms"], row["floor_gbps"], len(measured)) == (1.0, 8.0, 2)


def test_rates_of_copies(monkeypatch):
    sizes = []

    def timed(variants, **more):
        (run,) = variants.values()
        sizes.append(2 * run().nbytes)
        return {"copy": Timing(2.0, 2.0, 2.0, 1)}

    monkeypatch.setattr("kimivl_lab.measure.roofline.time_interleaved", timed)
    assert copy_gbps_of(8_000_000) == pytest.approx(4.0) and sizes[-1] == 8_000_000
    assert copy_gbps_of(1) > 0 and copy_gbps(mib=1) == pytest.approx(2 * 2**20 / 2e6)
    cache = SimpleNamespace(L2_cache_size=300 * 2**20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: cache)
    assert copy_mib("cuda", 256) == 600 and copy_mib("cuda", 1024) == 1024 and copy_mib("cpu", 256) == 256


def test_a_wrong_variant_is_never_timed():
    options = argparse.Namespace(benchmark="position", dtype="float32", device="cpu", seed=0, warmup=0, repeats=1)
    one, ran = torch.ones(3), []
    runs = {"right": lambda: one, "wrong": lambda: ran.append(1) or 2 * one}
    rows = compare(options, "case", runs, one, baseline="right", tolerance=1e-6, patches=3, bytes_moved=12, gbps=10.0)
    with pytest.raises(AssertionError, match="wrong is off by"):
        next(rows)
    assert len(ran) == 1, "checked, and not run again"


def test_the_peak_is_the_fastest_products_and_knows_its_noise():
    products = {"torch": Timing(100.0, 110.0, 120.0, 7), "amx": Timing(50.0, 55.0, 60.0, 7)}
    tflops, spread = encoder.peak_of(products, torch.device("cpu"))
    assert tflops == pytest.approx(encoder.PRODUCTS * 2 * 2048**3 / 50.0 / 1e9)
    assert spread == pytest.approx(1.2)


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
