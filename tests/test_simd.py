"""The AVX kernels, on each instruction set that this machine has: equal to the oracle, inside their memory, safe."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kimivl_lab import EncoderCudaGraphRunner, EncoderOptions
from kimivl_lab.kernels import library
from kimivl_lab.kernels.host_attention import attend
from kimivl_lab.moonvit.attention import ATTENTION_BACKENDS, resolve_attention
from tests.conftest import MIXED_GRIDS, pixels_for, relative_error, tiny_tower

CPU, F32 = torch.device("cpu"), torch.float32
NAMES = {"avx2": "AVX2", "avx512": "AVX-512"}
BOUND = 5e-7  # a few roundings of float32


@pytest.fixture(params=list(NAMES))
def isa(request, monkeypatch):
    """Lowers the kernels to one instruction set."""
    if sys.platform != "linux" or library._isa_unavailable(request.param):
        pytest.skip(f"needs {NAMES[request.param]}")
    monkeypatch.setenv(library.ISA_VARIABLE, request.param)
    library.kernel_isa.cache_clear()
    library._load.cache_clear()
    assert library.unavailable("simd", CPU, F32) is None and library.kernel_isa("simd") == request.param
    yield request.param
    library.kernel_isa.cache_clear()
    library._load.cache_clear()


def normal(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def offsets_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def exact(q, k, v, lengths):
    """float64, image by image."""
    images = zip(*(x[: sum(lengths)].double().split(list(lengths)) for x in (q, k, v)), strict=True)
    return torch.cat(
        [F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in image)).transpose(0, 1) for image in images]
    )


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=4),
    padding=st.integers(0, 5),
    heads=st.integers(1, 3),
    dim=st.sampled_from([1, 8, 20, 31, 64, 72, 80, 128]),
    scale=st.sampled_from([0.1, 1.0]),
)
@torch.no_grad()
def test_attention_equals_the_oracle(isa, lengths, padding, heads, dim, scale):
    rows = sum(lengths) + padding
    q, k, v = normal(rows, 3, heads, dim, seed=rows, scale=scale).unbind(1)  # views of packed rows
    got = attend("simd", q, k, v, offsets_of(lengths), max(lengths))
    assert got.shape == q.shape and got.is_contiguous() and got[sum(lengths) :].abs().sum() == 0
    if sum(lengths):
        error = (got[: sum(lengths)] - exact(q, k, v, lengths)).norm()
        assert error < BOUND * exact(q, k, v.abs(), lengths).norm()  # a mean of many values of both signs is near 0


@pytest.mark.parametrize("n", [64, 1024, 4096])
@torch.no_grad()
def test_errors_are_no_larger_than_torchs(isa, n):
    q, k, v = normal(n, 3, 2, 72).unbind(1)
    want = exact(q, k, v, [n])
    batch = (x.transpose(0, 1)[None] for x in (q, k, v))
    torchs = F.scaled_dot_product_attention(*batch)[0].transpose(0, 1)
    assert relative_error(attend("simd", q, k, v, offsets_of([n]), n), want) < relative_error(torchs, want)


@pytest.mark.parametrize("dim", [1, 31, 72])
@torch.no_grad()
def test_bfloat16_is_computed_in_float32_and_rounded_once(isa, dim):
    lengths = [36, 100, 24, 8]
    q, k, v = normal(180, 3, 2, dim).bfloat16().unbind(1)
    v[150] = float("nan")
    got = attend("simd", q, k, v, offsets_of(lengths), 100)
    single = attend("simd", q.float(), k.float(), v.float(), offsets_of(lengths), 100)
    torch.testing.assert_close(got, single.bfloat16(), rtol=0, atol=0, equal_nan=True)
    assert got.is_contiguous() and got[140].isnan().all() and got[168:].abs().sum() == 0


@torch.no_grad()
def test_a_maximum_that_rises_or_falls_is_followed(isa):
    rows, dim = 700, 72
    q, v = torch.ones(rows, 1, dim), normal(rows, 1, dim)
    for step in (1 / 4, 1 / 32, -1 / 4):  # scores without a rounding
        k = (torch.arange(rows) * step)[:, None, None].expand(rows, 1, dim).contiguous()
        assert relative_error(attend("simd", q, k, v, offsets_of([rows]), rows), exact(q, k, v, [rows])) < BOUND


@pytest.mark.parametrize("rows", [1, 33, 300])
@torch.no_grad()
def test_scores_of_any_size_stay_finite_and_infinite_keys_weigh_nothing(isa, rows):
    q, k, v = normal(rows, 3, 2, 72).unbind(1)
    for scale in (1e5, 1e10):  # one key has all the weight
        got = attend("simd", q * scale, k * scale, v, offsets_of([rows]), rows)
        assert relative_error(got, exact(q * scale, k * scale, v, [rows])) < BOUND
    k, ones = k.clone(), torch.ones(rows, 2, 72)
    k[: rows // 2] = float("-inf")
    assert relative_error(attend("simd", ones, k, v, offsets_of([rows]), rows), exact(ones, k, v, [rows])) < BOUND
    k[:] = float("-inf")  # no key has any weight: 0 / 0, as in torch
    assert attend("simd", ones, k, v, offsets_of([rows]), rows).isnan().all()


@torch.no_grad()
def test_layouts_bounds_and_threads_give_the_same_bits(isa):
    lengths = [320, 36, 4, 128]
    q, k, v = normal(sum(lengths), 3, 4, 72).unbind(1)
    want = attend("simd", q, k, v, offsets_of(lengths), 320)
    assert torch.equal(attend("simd", q, k, v, offsets_of(lengths), 10**6), want)
    for axis in (1, 2):
        turned = [x.transpose(axis - 1, axis).contiguous().transpose(axis - 1, axis) for x in (q, k, v)]
        assert torch.equal(attend("simd", *turned, offsets_of(lengths), 320), want)
    threads = torch.get_num_threads()
    try:
        for other in (1, 3, 64):
            torch.set_num_threads(other)
            assert torch.equal(attend("simd", q, k, v, offsets_of(lengths), 320), want), f"{other} threads"
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
def test_nan_reaches_its_own_image_and_nobody_else(isa):
    lengths = [36, 100, 24]
    q, k, v = (x.contiguous() for x in normal(200, 3, 2, 72).unbind(1))
    want = attend("simd", q, k, v, offsets_of(lengths), 100)
    for x in (q, k, v):
        x[40] = float("nan")
        x[160:] = float("nan")  # padding
    got = attend("simd", q, k, v, offsets_of(lengths), 100)
    assert torch.equal(got[:36], want[:36]) and torch.equal(got[136:], want[136:]) and got[36:136].isnan().all()


def test_the_kernel_stays_inside_its_operands_and_its_scratch(isa):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.guard_pages", "simd"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == f"{isa}\n", (done.returncode, done.stderr)


@torch.no_grad()
def test_auto_takes_the_kernel_and_the_tower_is_as_exact_as_with_torchs(isa):
    assert resolve_attention("auto", CPU, F32) is ATTENTION_BACKENDS["simd"]
    pixels = pixels_for(MIXED_GRIDS)
    want = tiny_tower(seed=4, options=EncoderOptions(attention="eager", linear="plain")).double()(
        pixels.double(), MIXED_GRIDS
    )
    error = {
        name: relative_error(tiny_tower(seed=4, options=EncoderOptions(attention=name))(pixels, MIXED_GRIDS), want)
        for name in ("auto", "sdpa")
    }
    assert error["auto"] < 1.1 * error["sdpa"]
    tower = tiny_tower(seed=4)
    runner = EncoderCudaGraphRunner(tower, [32], max_images=4)
    assert torch.equal(runner(pixels, MIXED_GRIDS), tower(pixels, MIXED_GRIDS)) and not runner.stats.eager


@pytest.mark.parametrize(
    "change, message",
    [
        ({"max_seqlen": 35}, "max_seqlen 35 is below the longest image, 36 patches"),
        ({"cu_seqlens": offsets_of([36, 60])}, r"at most 60 patches, got \[0, 36, 96\]"),
        ({"k": normal(60, 3, 72)}, r"k must be \(60, 2, 72\) torch.float32 .* got \(60, 3, 72\)"),
        ({"v": normal(60, 2, 72).bfloat16()}, "v must be .* torch.bfloat16"),
        ({"q": normal(60, 2, 72).double()}, "q must be .* torch.float32 .* torch.float64"),
        ({"q": normal(60, 2, 72).requires_grad_()}, "q wants a gradient"),
    ],
)
def test_operands_that_it_would_misread_are_refused(isa, change, message):
    x = normal(60, 2, 72)
    arguments = {"q": x, "k": x, "v": x, "cu_seqlens": offsets_of([36, 24]), "max_seqlen": 36}
    with pytest.raises(ValueError, match=message):
        attend("simd", **arguments | change)


# --- where there is no kernel ----------------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch):
    """The loader as in a new process, before and after the test."""
    for cached in (library.kernel_isa, library._load):
        cached.cache_clear()
    yield monkeypatch
    for cached in (library.kernel_isa, library._load):
        cached.cache_clear()


@pytest.mark.parametrize("system, machine", [("linux", "aarch64"), ("darwin", "arm64"), ("win32", "AMD64")])
@torch.no_grad()
def test_on_another_processor_or_system_everything_runs_on_torchs_kernels(fresh, system, machine):
    fresh.setattr(library.platform, "machine", lambda: machine)
    fresh.setattr(library, "sys", SimpleNamespace(platform=system))
    fresh.setattr(library, "_run", None)  # nothing is compiled
    assert f"not for {system} on {machine}" in str(library.unavailable("simd", CPU, F32))
    assert resolve_attention("auto", CPU, F32) is ATTENTION_BACKENDS["sdpa"]
    for dtype in (torch.float32, torch.bfloat16):
        assert tiny_tower().to(dtype)(pixels_for([(4, 6)]), [(4, 6)]).isfinite().all()


def test_an_instruction_set_that_is_unknown_is_refused_and_none_leaves_torchs(fresh):
    fresh.setenv(library.ISA_VARIABLE, "sse9")
    with pytest.raises(ValueError, match="KIMIVL_LAB_ISA='sse9': one of none, avx2, avx512, amx"):
        resolve_attention("auto", CPU, F32)
    fresh.setenv(library.ISA_VARIABLE, "none")
    assert resolve_attention("auto", CPU, F32) is ATTENTION_BACKENDS["sdpa"]


def test_without_a_compiler_the_reason_names_those_that_were_looked_for(fresh):
    if sys.platform != "linux" or library._isa_unavailable("avx2"):
        pytest.skip("needs AVX2")
    fresh.delenv("CC", raising=False)
    fresh.setattr(library.shutil, "which", lambda name: None)
    assert "neither gcc nor cc" in str(library.unavailable("simd", CPU, F32))


@pytest.mark.parametrize(
    "name, isa_name", [(name, isa) for name, one in library.LIBRARIES.items() for isa in one.flags]
)
def test_every_source_compiles_without_a_warning_whatever_this_processor_runs(tmp_path, name, isa_name):
    if sys.platform != "linux" or library.platform.machine() != "x86_64":
        pytest.skip("the flags are those of x86-64")
    for source, text in library._sources(name).items():
        (tmp_path / source).write_bytes(text)
    library._compile([*library._compiler(), *library._flags(name, isa_name), "-Werror"], tmp_path)


@pytest.mark.parametrize("name", library.LIBRARIES)
def test_a_compiler_for_another_processor_is_told_why_it_gives_no_kernel(tmp_path, name):
    for source, text in library._sources(name).items():
        (tmp_path / source).write_bytes(text)
    with pytest.raises(library.BuildError, match="these kernels are for x86-64"):
        library._compile([*library._compiler(), "-fopenmp", "-U__x86_64__"], tmp_path)
