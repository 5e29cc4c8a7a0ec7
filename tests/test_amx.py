"""The AMX kernels: equal to the references, safe on bad input, absent with a reason (skipped where there is no AMX)."""

import os
import re
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

from kimivl_lab import EncoderCudaGraphRunner, EncoderOptions
from kimivl_lab.graphs.trace import TraceBackend
from kimivl_lab.kernels import library
from kimivl_lab.kernels.amx.linear import multiply, pack, packed_linear
from kimivl_lab.kernels.amx.rope import rotate, rotate_
from kimivl_lab.kernels.host_attention import attend as attend_by
from kimivl_lab.kernels.packed_linear import PACKED_KERNELS, fused_linear, refresh_packed, resolve_linear
from kimivl_lab.kernels.rotation import ROPE_IMPLEMENTATIONS, resolve_rotation, rotate_complex
from kimivl_lab.moonvit.attention import ATTENTION_BACKENDS, resolve_attention
from kimivl_lab.moonvit.layers import ResolvedOptions
from kimivl_lab.moonvit.rope import Rope2DPosEmb
from tests.conftest import MIXED_GRIDS, pixels_for, relative_error, tiny_tower

CPU, BF16 = torch.device("cpu"), torch.bfloat16
REASON = library.unavailable("amx", CPU, BF16)
needs_amx = pytest.mark.skipif(REASON is not None, reason=str(REASON))
AMX = PACKED_KERNELS["amx"]
CALLS_OF_TINY = {"packed_linear": 8, "packed_attention": 2, "rotate_": 2}
OFFSETS_40 = torch.tensor([0, 40], dtype=torch.int32)


attend = partial(attend_by, "amx")


def normal(*shape, seed=0, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(BF16)


def offsets_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def exact_attention(q, k, v, lengths):
    """float64, image by image."""
    parts = zip(*(x.double().split([*lengths, len(x) - sum(lengths)]) for x in (q, k, v)), strict=True)
    images = [[x.transpose(0, 1) for x in part] for part in list(parts)[:-1]]
    return torch.cat([F.scaled_dot_product_attention(*image).transpose(0, 1) for image in images])


# --- attention -------------------------------------------------------------------------------------------------------


@needs_amx
@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=4),
    padding=st.integers(0, 5),
    heads=st.integers(1, 3),
    dim=st.sampled_from([8, 20, 31, 64, 72, 80, 96, 128]),
    scale=st.sampled_from([0.1, 1.0, 8.0]),
)
@torch.no_grad()
def test_attention_equals_the_oracle(lengths, padding, heads, dim, scale):
    rows = sum(lengths) + padding
    q, k, v = normal(rows, 3, heads, dim, seed=rows, scale=scale).unbind(1)  # views of packed rows
    got = attend(q, k, v, offsets_of(lengths), max(lengths))
    assert got.shape == q.shape and got.is_contiguous() and got[sum(lengths) :].abs().sum() == 0
    if sum(lengths):
        assert relative_error(got[: sum(lengths)], exact_attention(q, k, v, lengths)) < 4e-3


@needs_amx
@torch.no_grad()
def test_a_maximum_that_keeps_rising_is_followed():
    """Later keys outweigh earlier ones by far more than the slack, run after run, then by a little less."""
    rows, dim = 700, 72
    q, v = torch.ones(rows, 1, dim).to(BF16), normal(rows, 1, dim)
    for step in (0.25, 0.02, -0.25):
        k = (torch.arange(rows).float() * step).to(BF16)[:, None, None].expand(rows, 1, dim).contiguous()
        got = attend(q, k, v, offsets_of([rows]), rows)
        assert relative_error(got, exact_attention(q, k, v, [rows])) < 4e-3


@needs_amx
@pytest.mark.parametrize("lengths", [[1], [33], [300]], ids=str)
@torch.no_grad()
def test_scores_of_any_size_stay_finite(lengths):
    rows = sum(lengths)
    q, k, v = normal(rows, 3, 2, 72).unbind(1)
    for scale in (1e3, 1e5, 1e10):
        got = attend(q * scale, k * scale, v, offsets_of(lengths), rows)
        assert relative_error(got, exact_attention(q * scale, k * scale, v, lengths)) < 4e-3
    k[: rows // 2] = float("-inf")  # for queries of ones, scores of -infinity: half of the keys, or none
    got = attend(torch.ones_like(q), k, v, offsets_of(lengths), rows)
    assert relative_error(got, exact_attention(torch.ones_like(q), k, v, lengths)) < 4e-3


@needs_amx
@torch.no_grad()
def test_attention_by_any_layout_bound_and_number_of_threads_gives_the_same_bits():
    lengths = [320, 36, 4, 128]
    q, k, v = normal(sum(lengths), 3, 4, 72).unbind(1)
    want = attend(q, k, v, offsets_of(lengths), 320)
    assert torch.equal(attend(q, k, v, offsets_of(lengths), 10**6), want)
    heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    assert torch.equal(attend(*heads_first, offsets_of(lengths), 320), want)
    channels_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(attend(*channels_first, offsets_of(lengths), 320), want)
    threads = torch.get_num_threads()
    try:
        for other in (1, 3, 64):
            torch.set_num_threads(other)
            assert torch.equal(attend(q, k, v, offsets_of(lengths), 320), want), f"{other} threads"
    finally:
        torch.set_num_threads(threads)


@needs_amx
@torch.no_grad()
def test_nan_reaches_its_own_image_and_nobody_else():
    lengths = [36, 100, 24]
    q, k, v = (x.contiguous() for x in normal(200, 3, 2, 72).unbind(1))
    want = attend(q, k, v, offsets_of(lengths), 100)
    for x in (q, k, v):
        x[40] = float("nan")
        x[160:] = float("nan")  # padding
    got = attend(q, k, v, offsets_of(lengths), 100)
    assert torch.equal(got[:36], want[:36]) and torch.equal(got[136:], want[136:])
    assert got[36:136].isnan().all(), "a key that is not a number spoils every query of its image"


@needs_amx
@pytest.mark.parametrize(
    "change, message",
    [
        ({"max_seqlen": 35}, "max_seqlen 35 is below the longest image, 36 patches"),
        ({"cu_seqlens": offsets_of([36, 60])}, r"at most 60 patches, got \[0, 36, 96\]"),
        ({"cu_seqlens": torch.tensor([0, 36, 20], dtype=torch.int32)}, r"rise .* got \[0, 36, 20\]"),
        ({"cu_seqlens": torch.tensor([4, 36], dtype=torch.int32)}, r"from 0 .* got \[4, 36\]"),
        ({"k": normal(60, 3, 72)}, r"k must be \(60, 2, 72\) torch.bfloat16 .* got \(60, 3, 72\)"),
        ({"v": normal(60, 2, 72).float()}, "v must be .* torch.float32"),
        ({"q": normal(60, 2, 72).requires_grad_()}, "q wants a gradient"),
        ({"cu_seqlens": torch.tensor([0, 36, 60])}, "cu_seqlens must be .* torch.int32 .* got .* torch.int64"),
        ({"q": TwoTensor(normal(60, 2, 72), normal(60, 2, 72))}, "q must be a plain tensor, got a TwoTensor"),
        ({name: normal(60, 2, 0) for name in "qkv"}, "got 2 heads of 0"),
    ],
)
def test_attention_refuses_what_it_would_misread(change, message):
    x = normal(60, 2, 72)
    arguments = {"q": x, "k": x, "v": x, "cu_seqlens": offsets_of([36, 24]), "max_seqlen": 36}
    with pytest.raises(ValueError, match=message):
        attend(**arguments | change)


@needs_amx
def test_attention_stays_inside_its_operands_and_its_scratch():
    done = subprocess.run(
        [sys.executable, "-m", "tests.guard_pages", "amx"], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "amx\n", (done.returncode, done.stderr)


# --- linear layers ---------------------------------------------------------------------------------------------------


@needs_amx
@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(0, 600),
    inputs=st.integers(1, 700),
    outputs=st.integers(1, 200),
    biased=st.booleans(),
    extra=st.sampled_from(["", "gelu", "residual"]),
)
@torch.no_grad()
def test_linear_equals_the_oracle(rows, inputs, outputs, biased, extra):
    wide = normal(rows, inputs + 3, seed=rows)
    x, weight = wide[:, :inputs], normal(outputs, inputs, seed=1, scale=inputs**-0.5)  # x: a part of wider rows
    bias = normal(outputs, seed=2) if biased else None
    residual = normal(rows, outputs, seed=3) if extra == "residual" else None
    want = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    if extra == "gelu":
        want = F.gelu(want, approximate="tanh")
    if residual is not None:
        want = want + residual.double()
    got = multiply(x, pack(weight), outputs, bias, residual, extra == "gelu")
    assert got.shape == want.shape and got.dtype == BF16
    if rows:
        assert relative_error(got, want) < 4e-3


@needs_amx
@torch.no_grad()
def test_linear_gives_the_same_bits_on_any_number_of_threads_and_rows_do_not_meet():
    x, weight, bias = normal(300, 1152), normal(100, 1152, scale=0.03), normal(100)
    packed, threads = pack(weight), torch.get_num_threads()
    want = multiply(x, packed, 100, bias, None, True)
    try:
        for other in (1, 3, 64):
            torch.set_num_threads(other)
            assert torch.equal(pack(weight), packed)
            assert torch.equal(multiply(x, packed, 100, bias, None, True), want), f"{other} threads"
    finally:
        torch.set_num_threads(threads)
    x[17] = float("nan")
    got = multiply(x, packed, 100, bias, None, True)
    assert got[17].isnan().all() and torch.equal(got[:17], want[:17]) and torch.equal(got[18:], want[18:])


@needs_amx
@torch.no_grad()
def test_gelu_of_numbers_far_from_zero():
    x = torch.tensor([[-3e38, -1e5, -90.0, -13.0, -5.0, -1e-3, 0.0, 1e-3, 5.0, 90.0, 1e5, 3e38]]).to(BF16).t()
    got = multiply(x, pack(torch.ones(1, 1).to(BF16)), 1, None, None, True)
    want = F.gelu(x.double(), approximate="tanh")
    assert torch.allclose(got.double(), want, rtol=4e-3, atol=1e-6)


@needs_amx
@pytest.mark.parametrize(
    "change, message",
    [
        ({"out_features": 100}, r"packed weight must be \(4, 3, 2, 512\) .* got \(2, 3, 2, 512\)"),
        ({"x": normal(5, 72).requires_grad_()}, "x wants a gradient"),
        ({"x": normal(5, 72).float()}, r"x must be \(5, 72\) torch.bfloat16 .* torch.float32"),
        ({"bias": normal(55)}, r"bias must be \(56,\) .* got \(55,\)"),
        ({"residual": normal(4, 56)}, r"residual must be \(5, 56\) .* got \(4, 56\)"),
    ],
)
def test_linear_refuses_what_it_would_misread(change, message):
    arguments = {"x": normal(5, 72), "packed": pack(normal(56, 72)), "out_features": 56, "bias": None}
    with pytest.raises(ValueError, match=message):
        multiply(**arguments | {"residual": None, "gelu_tanh": False} | change)


@needs_amx
@torch.no_grad()
def test_only_a_weight_in_memory_is_packed():
    for weight in (torch.empty(8, 8, dtype=BF16, device="meta"), torch.ones(8, 8), torch.ones(8, 0).to(BF16)):
        with pytest.raises(ValueError, match="weight must be|at least 1 input"):
            pack(weight)
    tower = tiny_tower().to(BF16)
    tower.encoder.blocks[1].mlp.fc1.to("meta")
    with pytest.raises(RuntimeError, match="meta"):
        tower(pixels_for([(4, 6)]), [(4, 6)])


@needs_amx
@torch.no_grad()
def test_results_lie_on_the_host_whatever_torchs_default_device():
    x, weight = normal(40, 2, 72), normal(56, 72)
    want = attend(x, x, x, OFFSETS_40, 40), multiply(x[:, 0], pack(weight), 56, None, None, False)
    with torch.device("meta"):
        got = (
            attend(x, x, x, cu_seqlens=OFFSETS_40, max_seqlen=40),
            multiply(x[:, 0], pack(weight), 56, None, None, False),
        )
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


@needs_amx
@torch.no_grad()
def test_a_layer_packs_for_the_kernel_that_is_asked_for_and_anew_when_its_weight_changes():
    layer, x = torch.nn.Linear(72, 56).to(BF16), normal(24, 72)
    seen = {}
    for name, kernel in [*PACKED_KERNELS.items(), *PACKED_KERNELS.items()]:
        refresh_packed([layer], kernel)
        seen.setdefault(name, []).append(fused_linear(layer, x, kernel, gelu=True))
        assert relative_error(seen[name][-1], fused_linear(layer, x, None, gelu=True)) < 8e-3
    assert all(torch.equal(*twice) for twice in seen.values())
    refresh_packed([layer], AMX)
    before = fused_linear(layer, x, AMX)
    layer.weight.mul_(-2)
    refresh_packed([layer], AMX)
    assert (
        relative_error(fused_linear(layer, x, AMX), layer(x))
        < 8e-3
        < 0.1
        < relative_error(fused_linear(layer, x, AMX), before)
    )


# --- rope ------------------------------------------------------------------------------------------------------------


@needs_amx
@pytest.mark.parametrize("dim, heads", [(72, 16), (8, 1), (64, 3), (100, 2), (512, 1)])
@torch.no_grad()
def test_rope_equals_the_reference_and_leaves_v_alone(dim, heads):
    grids = [(4, 6), (2, 12), (20, 8)]
    qkv, cos_sin = normal(208, 3, heads, dim), Rope2DPosEmb(dim).get_cos_sin(grids)
    before, want = qkv.clone(), rotate_complex(qkv[:, :2].double(), cos_sin.double())
    rotate(qkv[:, :2], cos_sin)
    assert torch.equal(qkv[:, 2], before[:, 2])
    assert relative_error(qkv[:, :2], want) <= 1.01 * relative_error(rotate_complex(before[:, :2], cos_sin), want)


@needs_amx
@pytest.mark.parametrize(
    "qk, cos_sin, message",
    [
        (normal(6, 2, 4, 72).float(), torch.zeros(6, 36, 2), "qk must be .* torch.float32"),
        (normal(6, 2, 4, 72), torch.zeros(5, 36, 2), r"cos_sin must be \(6, 36, 2\) .* got \(5, 36, 2\)"),
        (normal(6, 2, 4, 72), torch.zeros(6, 36, 2).double(), "cos_sin must be .* torch.float64"),
        (normal(6, 2, 4, 514), torch.zeros(6, 257, 2), "at most 512 channels.* got 514"),
        (normal(2, 6, 4, 72).transpose(0, 1), torch.zeros(6, 36, 2), "one after another"),
    ],
)
@torch.no_grad()
def test_rope_refuses_what_it_would_misread(qk, cos_sin, message):
    with pytest.raises(ValueError, match=message):
        rotate(qk, cos_sin)


# --- the tower -------------------------------------------------------------------------------------------------------


@needs_amx
@torch.no_grad()
def test_auto_takes_the_kernels_and_the_tower_is_as_exact_as_without():
    for resolved, ours in (
        (resolve_attention("auto", CPU, BF16), ATTENTION_BACKENDS["amx"]),
        (resolve_linear("auto", CPU, BF16), AMX),
        (resolve_rotation("auto", CPU, BF16), ROPE_IMPLEMENTATIONS["amx"]),
    ):
        assert resolved is ours
    pixels = pixels_for(MIXED_GRIDS)
    want = tiny_tower(seed=4, options=EncoderOptions(attention="eager", linear="plain")).double()(
        pixels.double(), MIXED_GRIDS
    )
    plain = EncoderOptions(attention="sdpa", linear="plain", rope="complex")
    error = {
        options.attention: relative_error(tiny_tower(seed=4, options=options).to(BF16)(pixels, MIXED_GRIDS), want)
        for options in (EncoderOptions(), plain)
    }
    assert error["auto"] < 1.1 * error["sdpa"]


@needs_amx
def test_where_gradients_are_wanted_the_references_run():
    tower = tiny_tower().to(BF16)
    features = tower(pixels_for([(4, 6)]), [(4, 6)])
    features.sum().backward()
    assert tower.encoder.blocks[0].wqkv.weight.grad.abs().sum() > 0
    tower.set_options(attention="amx", linear="amx", rope="amx")
    assert torch.equal(tower(pixels_for([(4, 6)]), [(4, 6)]), features)


@needs_amx
@torch.no_grad()
def test_a_graph_replays_the_kernels_whatever_the_tower_turns_to_and_sees_a_changed_weight():
    tower, grids = tiny_tower(seed=2).to(BF16), [(4, 6), (2, 2), (8, 4)]
    runner, pixels = EncoderCudaGraphRunner(tower, [16], max_images=4), pixels_for(grids)
    want = tower(pixels, grids)
    for linear in ("auto", "prepacked", "plain", "amx", "prepacked"):
        tower.set_options(linear=linear)
        assert relative_error(tower(pixels, grids), want) < 0.02
        assert torch.equal(runner(pixels, grids), want), linear
    tower.encoder.blocks[1].mlp.fc1.weight.mul_(3)
    changed = runner(pixels, grids)
    tower.set_options(linear="auto")
    assert torch.equal(changed, tower(pixels, grids)) and relative_error(changed, want) > 1e-2
    assert runner.stats.graphs[16].calls == 6 and not runner.stats.eager


@needs_amx
@torch.no_grad()
def test_a_recorded_block_is_made_of_the_kernels():
    tower, grids = tiny_tower(seed=2).to(BF16), [(4, 6), (2, 2)]
    metadata, kernels = tower.prepare_encoder_metadata(grids), ResolvedOptions.resolve(EncoderOptions(), CPU, BF16)
    x = normal(28, tower.config.hidden_size)
    want = tower.encoder(x, metadata, kernels)  # packs the weights, too
    graph = TraceBackend().capture(lambda x: tower.encoder(x, metadata, kernels), {"x": x}, dict, False)
    graph.replay()
    assert torch.equal(graph.output, want)
    assert {name: graph.kept.source.count(f"{name}(") for name in CALLS_OF_TINY} == CALLS_OF_TINY


@needs_amx
@torch.no_grad()
def test_who_watches_sees_operators():
    tower, grids = tiny_tower().to(BF16), [(4, 6)]
    pixels, plain = pixels_for(grids), tiny_tower(options=EncoderOptions(linear="plain")).to(BF16)
    tower(pixels, grids)
    layer, x = tower.encoder.blocks[0].wqkv.requires_grad_(False), normal(24, 288)
    traced = torch.jit.trace(lambda x: fused_linear(layer, x, AMX), x, check_trace=False)
    assert torch.equal(traced(-x), fused_linear(layer, -x, AMX))
    assert torch.equal(make_fx(lambda x: fused_linear(layer, x, AMX))(x)(-x), fused_linear(layer, -x, AMX))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert fused_linear(layer, mode.from_tensor(x), AMX).shape == (24, 3 * 288)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        tower(pixels, grids)
    seen = {event.key: event.count for event in profile.key_averages() if event.key.startswith("kimivl_lab::")}
    assert seen == {f"kimivl_lab::{name}": count for name, count in CALLS_OF_TINY.items()}
    tower.set_options(linear="prepacked")  # a trace right after: packed for another kernel, so plain
    metadata = tower.prepare_encoder_metadata(grids)
    graph = make_fx(lambda x: tower(x, encoder_metadata=metadata))(pixels)
    assert relative_error(graph(pixels), plain(pixels, grids)) < 0.02


@needs_amx
@torch.no_grad()
def test_the_operators_keep_torchs_rules():
    x, packed = normal(5, 72), pack(normal(56, 72))
    torch.library.opcheck(packed_linear, (x, packed, 56, normal(56), None, True))
    torch.library.opcheck(rotate_, (normal(6, 2, 4, 72), Rope2DPosEmb(72).get_cos_sin([(2, 3)])))


# --- where there are none --------------------------------------------------------------------------------------------


def test_other_devices_and_dtypes_say_why_not():
    assert "for CPUs, not for cuda" in str(library.unavailable("amx", torch.device("cuda"), BF16))
    assert "take bfloat16, not torch.float32" in str(library.unavailable("amx", CPU, torch.float32))
    tower = tiny_tower()
    for options in (EncoderOptions(attention="amx"), EncoderOptions(linear="amx"), EncoderOptions(rope="amx")):
        with torch.no_grad(), pytest.raises(ValueError, match="take bfloat16, not torch.float32"):
            tiny_tower(options=options)(pixels_for([(4, 6)]), [(4, 6)])
    assert resolve_attention("auto", tower.device, tower.dtype) is ATTENTION_BACKENDS["sdpa"]


WITHOUT = """
import torch
from kimivl_lab import MoonViTConfig, MoonVitPretrainedModel
from kimivl_lab.kernels.library import unavailable
tower = MoonVitPretrainedModel(MoonViTConfig.preset("tiny")).eval().bfloat16()
with torch.no_grad():
    print(tower(torch.randn(24, 3, 14, 14), [(4, 6)]).isfinite().all().item())
    print(unavailable("amx", torch.device("cpu"), torch.bfloat16))
    tower.set_options(attention="amx")
    try:
        tower(torch.randn(24, 3, 14, 14), [(4, 6)])
    except ValueError as error:
        print("refused:", error)
"""


@needs_amx
@pytest.mark.parametrize(
    "compiler, reason",
    [
        ("false", "could not be built: false said nothing"),
        ("no-such-compiler", "could not be built: .*no-such-compiler"),
        ("cc '", "could not be built: No closing quotation"),
        ("cc -include none.h", "could not be built: cc said .*none.h"),
    ],
)
def test_without_a_working_compiler_the_tower_runs_on_torchs_kernels(tmp_path, compiler, reason):
    environment = {**os.environ, "CC": compiler, "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", WITHOUT], env=environment, capture_output=True, text=True, timeout=120)
    finite, why, refused = done.stdout.splitlines()
    assert finite == "True" and refused == f"refused: {why}"
    assert re.search(reason, why)
    assert not list(tmp_path.rglob("*.so")), "nothing half-built is left"


@needs_amx
@pytest.mark.parametrize("damage", [b"", b"not a library"], ids=["empty", "another file"])
def test_the_library_is_built_once_and_again_if_damaged(tmp_path, monkeypatch, damage):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target, load = library._target("amx", "amx"), library._load.__wrapped__
    target.parent.mkdir()
    target.write_bytes(damage)
    assert not isinstance(load("amx"), str) and target.stat().st_size > 10_000
    made = target.stat().st_mtime_ns
    assert not isinstance(load("amx"), str) and target.stat().st_mtime_ns == made
    assert list(target.parent.iterdir()) == [target]
