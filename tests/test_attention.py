"""Packed attention and the fused linear layers (faults E, H7)."""

import copy
import pickle
import re
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from kimivl_lab import EncoderOptions, MoonViTConfig, MoonVitPretrainedModel
from kimivl_lab.kernels.packed_attention import _import_error, attend_packed, packed_attention_backward
from kimivl_lab.kernels.packed_linear import (
    PACKED_KERNELS,
    PackedCopy,
    fused_linear,
    packed_copy,
    packed_unavailable,
    refresh_packed,
)
from kimivl_lab.moonvit.attention import (
    ATTENTION_BACKENDS,
    attention_unavailable,
    eager_attention,
    packed_attention,
    resolve_attention,
)
from tests.conftest import MIXED_GRIDS, pixels_for, relative_error, tiny_tower

CPU = ("sdpa", "sdpa_masked", "eager")
ONEDNN = PACKED_KERNELS["prepacked"]
needs_onednn = pytest.mark.skipif(
    packed_unavailable("prepacked", torch.device("cpu"), torch.float32) is not None, reason="this torch has no oneDNN"
)


def qkv(rows, heads=4, dim=72, dtype=torch.float32, seed=0):
    return torch.randn(rows, 3, heads, dim, generator=torch.Generator().manual_seed(seed)).to(dtype).unbind(1)


def metadata_for(grids, **arguments):
    return tiny_tower().prepare_encoder_metadata(grids, **arguments)


# --- packed attention ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", CPU)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grids", [MIXED_GRIDS, [(4, 6)] * 3, [(2, 2), (4, 6), (4, 6), (2, 2)]], ids=str)
@torch.no_grad()
def test_backends_equal_the_oracle(backend, dtype, grids):
    metadata = metadata_for(grids)
    tensors = qkv(metadata.num_patches, dtype=dtype)
    want = eager_attention(*(x.double() for x in tensors), metadata)
    got = ATTENTION_BACKENDS[backend](*tensors, metadata)
    assert got.dtype == dtype
    assert relative_error(got, want) < (1e-6 if dtype == torch.float32 else 6e-3)


@pytest.mark.parametrize("backend", CPU)
@torch.no_grad()
def test_E7_a_nan_past_the_last_image_reaches_nobody(backend):
    metadata = metadata_for(MIXED_GRIDS, max_images=7)
    tensors = [torch.cat((x, torch.full((9, 4, 72), float("nan")))) for x in qkv(metadata.num_patches)]
    want = eager_attention(*(x[:-9] for x in tensors), metadata)
    got = ATTENTION_BACKENDS[backend](*tensors, metadata)
    assert got.shape == tensors[0].shape
    assert relative_error(got[:-9], want) < 1e-6
    assert torch.equal(got[-9:], torch.zeros(9, 4, 72))


@torch.no_grad()
def test_H6_any_larger_bound_gives_the_same_values_and_a_smaller_one_is_refused():
    metadata = metadata_for(MIXED_GRIDS)
    tensors = qkv(metadata.num_patches)
    want = packed_attention(*tensors, metadata.cu_seqlens, metadata.max_seqlen, "sdpa")
    assert torch.equal(packed_attention(*tensors, metadata.cu_seqlens, 10**6, "sdpa"), want)
    with pytest.raises(ValueError, match="max_seqlen 39 is below the longest image, 40 patches"):
        packed_attention(*tensors, metadata.cu_seqlens, 39, "sdpa")


def test_E5_offsets_of_another_type_are_refused():
    with pytest.raises(ValueError, match="int32, got .*int64"):
        packed_attention(*qkv(4), torch.tensor([0, 4]), 4, "sdpa")


def test_E1_memory_grows_with_the_largest_image_only(monkeypatch):
    """The largest score matrix that any call could build: one image's for "sdpa", the whole batch's with a mask."""
    sizes = []
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def recording(q, k, v, **kwargs):
        mask = kwargs.get("attn_mask")
        sizes.append(k.shape[-2] if mask is None else mask.shape[-1])
        return sdpa(q, k, v, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recording)
    metadata = metadata_for([(4, 4)] * 2 + [(4, 8)] + [(4, 4)] * 5)
    largest = {}
    for backend in ("sdpa", "sdpa_masked"):
        sizes.clear()
        with torch.no_grad():
            ATTENTION_BACKENDS[backend](*qkv(metadata.num_patches), metadata)
        largest[backend] = max(sizes)
    assert largest == {"sdpa": 32, "sdpa_masked": 7 * 16 + 32}


BAD_OFFSETS = [[4, 92], [0, 24, 20, 92], [0, 24, 96], [-4, 92], []]  # of the 92 patches of MIXED_GRIDS


@pytest.mark.parametrize("offsets", BAD_OFFSETS, ids=str)
def test_S14_the_operator_refuses_offsets_that_are_none(offsets):
    for attend in (packed_attention, attend_packed):
        with pytest.raises(ValueError, match=f"rise from 0 to at most 92 patches, got {re.escape(str(offsets))}"):
            attend(*qkv(92), torch.tensor(offsets, dtype=torch.int32), 92, "sdpa")


@pytest.mark.parametrize("offsets", [*BAD_OFFSETS, [0, 24, 28, 68]], ids=str)
def test_S14_metadata_refuses_offsets_that_are_none(offsets):
    """So every backend does, whatever it reads: none can be given such metadata."""
    metadata = metadata_for(MIXED_GRIDS, max_images=6)
    with pytest.raises(
        ValueError, match=re.escape(f"92, the patches of the grids, got {offsets}") + "|0 to at most 92"
    ):
        replace(metadata, cu_seqlens=torch.tensor(offsets, dtype=torch.int32), max_seqlen=92)


@pytest.mark.parametrize("offsets", [[0, 92], [0, 30, 92], [0, 0, 46, 46, 92]], ids=str)
@torch.no_grad()
def test_other_segments_than_the_images_are_those_of_every_backend(offsets):
    metadata, tensors = metadata_for(MIXED_GRIDS), qkv(92)
    segments = replace(metadata, cu_seqlens=torch.tensor(offsets, dtype=torch.int32), max_seqlen=92)
    results = [ATTENTION_BACKENDS[backend](*tensors, segments) for backend in CPU]
    assert all(relative_error(result, results[-1]) < 1e-6 for result in results)
    assert relative_error(eager_attention(*tensors, metadata), results[-1]) > 0.1
    assert segments.to("meta").seqlens == segments.seqlens != metadata.seqlens


def test_S14_metadata_made_by_hand_is_checked_as_a_whole():
    metadata = metadata_for(MIXED_GRIDS, max_images=6)
    assert metadata.to("meta").seqlens == metadata.seqlens == [24, 4, 40, 24]
    with pytest.raises(ValueError, match="int64"):
        replace(metadata, cu_seqlens=metadata.cu_seqlens.long())
    with pytest.raises(ValueError, match="max_seqlen 39 is below the longest image, 40 patches"):
        replace(metadata, max_seqlen=39)


@pytest.mark.parametrize("backend", CPU)
def test_S14_fewer_patches_than_the_grids_need_are_refused(backend):
    with pytest.raises(ValueError, match="q holds 80 patches, .* need 92"):
        ATTENTION_BACKENDS[backend](*qkv(80), metadata_for(MIXED_GRIDS))


@pytest.mark.parametrize(
    "capability, expected", [((7, 5), "sdpa"), ((8, 0), "torch_varlen"), ((10, 0), "torch_varlen")]
)
def test_auto_takes_no_kernel_that_the_gpu_is_too_old_for(capability, expected, monkeypatch):
    """A T4 takes bfloat16 tensors; the CUDA kernels begin with Ampere."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name.startswith("torch.") else None)
    assert resolve_attention("auto", "cuda", torch.bfloat16) is ATTENTION_BACKENDS[expected]
    if expected == "sdpa":
        with pytest.raises(ValueError, match=r"8\.0 \(Ampere\), this one has 7\.5"):
            resolve_attention("torch_varlen", "cuda", torch.bfloat16)


def test_auto_passes_a_package_that_cannot_be_imported(monkeypatch, tmp_path):
    """flash-attn is compiled for one torch, and its import fails with another."""
    (tmp_path / "flash_attn.py").write_text("raise ImportError('undefined symbol: _ZN3c104cuda9SetDevice')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    _import_error.cache_clear()
    assert resolve_attention("auto", "cuda", torch.bfloat16) is ATTENTION_BACKENDS["torch_varlen"]
    with pytest.raises(ValueError, match="undefined symbol"):
        resolve_attention("flash_attn", "cuda", torch.bfloat16)
    _import_error.cache_clear()


def test_an_unknown_kernel_is_refused():
    with pytest.raises(ValueError, match="'varlen': one of flash_attn, torch_varlen, amx, simd, sdpa"):
        attend_packed(*qkv(4), torch.tensor([0, 4], dtype=torch.int32), 4, "varlen")


def test_the_operators_pass_torch_librarys_own_checks():
    metadata = metadata_for(MIXED_GRIDS)
    q, k, v = (x.clone().requires_grad_() for x in qkv(92))
    torch.library.opcheck(packed_attention, (q, k, v, metadata.cu_seqlens, metadata.max_seqlen, "sdpa"))
    torch.library.opcheck(packed_attention_backward, (torch.ones(92, 4, 72), *qkv(92), metadata.cu_seqlens))


# --- gradients -------------------------------------------------------------------------------------------------------


def gradients(attend, metadata, rows, dtype=torch.float64, **how):
    """Of q, k and v, for a result weighted by noise; the rows past the last image are asked for as well."""
    tensors = [x.clone().requires_grad_() for x in qkv(rows, dtype=dtype)]
    attend(*tensors, metadata, **how).mul(qkv(rows, seed=1, dtype=dtype)[0]).sum().backward()
    return [x.grad for x in tensors]


@contextmanager
def profiled():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        yield


class Observing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


OBSERVED = {"alone": nullcontext, "profiler": profiled, "mode": Observing}


@pytest.mark.parametrize("observed", OBSERVED)
@pytest.mark.parametrize("backend", CPU)
def test_W1_every_backend_has_the_reference_gradients(backend, observed):
    metadata = metadata_for([*MIXED_GRIDS, (4, 6)], max_images=7)
    want = gradients(eager_attention, metadata, 120)
    with OBSERVED[observed]():
        got = gradients(ATTENTION_BACKENDS[backend], metadata, 120)
    for ours, theirs in zip(got, want, strict=True):
        assert relative_error(ours, theirs) < 1e-12
        assert torch.equal(ours[116:], torch.zeros(4, 4, 72, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_W1_the_operators_backward_keeps_the_dtype_within_its_rounding(dtype):
    metadata = metadata_for(MIXED_GRIDS)
    want = gradients(eager_attention, metadata, 92)
    operator = lambda q, k, v, m: packed_attention(q, k, v, m.cu_seqlens, m.max_seqlen, "sdpa")  # noqa: E731
    for ours, theirs in zip(gradients(operator, metadata, 92, dtype), want, strict=True):
        assert ours.dtype == dtype and relative_error(ours, theirs) < (1e-5 if dtype == torch.float32 else 0.02)


def test_W1_the_operator_has_the_derivative_of_its_forward():
    """By finite differences, for offsets with an empty slot and rows of no image."""
    offsets = torch.tensor([0, 3, 3, 5], dtype=torch.int32)
    tensors = [x.clone().requires_grad_() for x in qkv(6, heads=2, dim=4, dtype=torch.float64)]
    assert torch.autograd.gradcheck(lambda *x: packed_attention(*x, offsets, 3, "sdpa"), tensors)


def test_W1_gradients_pass_through_a_compiled_graph():
    metadata = metadata_for(MIXED_GRIDS)
    compiled = torch.compile(ATTENTION_BACKENDS["sdpa"], backend="aot_eager", fullgraph=True)
    for ours, theirs in zip(gradients(compiled, metadata, 92), gradients(eager_attention, metadata, 92), strict=True):
        assert relative_error(ours, theirs) < 1e-12


@pytest.mark.parametrize("options", [{}, {"attention": "sdpa_masked"}, {"rope": "in_place"}, {"linear": "prepacked"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_W1_a_tower_in_training_has_the_same_gradients_under_a_profiler(options, dtype):
    towers = [tiny_tower(seed=3, options=EncoderOptions(**options)).to(dtype) for _ in range(2)]
    for tower, observed in zip(towers, (nullcontext, profiled), strict=True):
        with observed():
            tower(pixels_for(MIXED_GRIDS), MIXED_GRIDS).float().square().sum().backward()
    for (name, one), (_, other) in zip(*(tower.named_parameters() for tower in towers), strict=True):
        assert one.grad is not None and one.grad.any(), name
        assert relative_error(other.grad, one.grad) < (1e-5 if dtype == torch.float32 else 0.05), name


@pytest.mark.parametrize("kernel", ["flash_attn", "torch_varlen"])
def test_W1_cuda_kernels_are_called_directly_for_their_own_backward(kernel, monkeypatch):
    """The kernel is replaced by the reference, on a CPU: what is tested is that autograd sees through to it."""
    monkeypatch.setattr("kimivl_lab.moonvit.attention.attention_unavailable", lambda *_: None)
    seen = []

    def kernel_of_cuda(q, k, v, cu_seqlens, other, max_seqlen, longest):
        seen.append(max_seqlen)
        out = attend_packed(q, k, v, cu_seqlens, max_seqlen, "sdpa")
        return torch.cat((out[: int(cu_seqlens[-1])], torch.full_like(out[int(cu_seqlens[-1]) :], float("nan"))))

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=kernel_of_cuda))
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel_of_cuda)
    metadata, attend = metadata_for(MIXED_GRIDS, max_images=6), resolve_attention(kernel, "cuda", torch.bfloat16)
    got, want = gradients(attend, metadata, 96), gradients(eager_attention, metadata, 96)
    assert seen == [40]
    assert all(relative_error(*pair) < 1e-12 for pair in zip(got, want, strict=True))
    with profiled():
        observed = gradients(attend, metadata, 96)
    assert all(relative_error(*pair) < 1e-12 for pair in zip(observed, want, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("observed", ["alone", "profiler"])
def test_W1_gradients_on_a_gpu_in_bfloat16(observed):
    metadata = metadata_for(MIXED_GRIDS)
    want = gradients(eager_attention, metadata, 92)
    there = metadata.to("cuda")

    def attend(q, k, v, _):
        return resolve_attention("auto", "cuda", torch.bfloat16)(q.cuda(), k.cuda(), v.cuda(), there).cpu()

    with OBSERVED[observed]():
        got = gradients(attend, metadata, 92, torch.bfloat16)
    assert all(relative_error(*pair) < 0.02 for pair in zip(got, want, strict=True))


@pytest.mark.parametrize("backend", ["flash_attn", "torch_varlen"])
def test_a_backend_that_cannot_run_here_says_why(backend):
    reason = attention_unavailable(backend, torch.device("cpu"), torch.bfloat16)
    assert reason is not None and "needs a CUDA device" in reason
    with pytest.raises(ValueError, match="needs a CUDA device"):
        resolve_attention(backend)
    assert "not torch.float32" in str(attention_unavailable(backend, torch.device("cuda"), torch.float32))


@pytest.mark.parametrize("backend", ["flash_attn", "torch_varlen", "sdpa"])
def test_the_whole_tower_on_a_fake_gpu_reads_nothing_back(backend, monkeypatch):
    """Under FakeTensorMode a read of a device value is an error, so finishing is the proof."""
    monkeypatch.setattr("kimivl_lab.moonvit.attention.attention_unavailable", lambda *_: None)
    config = MoonViTConfig.preset("tiny")
    with torch.device("meta"):
        tower = MoonVitPretrainedModel(config, EncoderOptions(attention=backend, rope="complex")).bfloat16().eval()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        tower = tower.to_empty(device="cuda")
        pixels = torch.empty(92, 3, 14, 14, device="cuda", dtype=torch.bfloat16)
        features = tower(pixels, MIXED_GRIDS)
        assert features.device.type == "cuda" and features.shape == (23, 4, 288)
        with pytest.raises(Exception, match="_local_scalar_dense"):
            features.sum().item()


# --- fused linear layers ---------------------------------------------------------------------------------------------


@needs_onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 24, 1500])
@torch.no_grad()
def test_prepacked_equals_plain(dtype, rows):
    """Both are within rounding of float64, in whatever order a product adds up: 72 terms in float32 are off by about
    sqrt(72 / 6) units of rounding, and storing the result adds one unit of `dtype`. In a single row the error of one
    product may be several times that of the other, so neither bounds the other."""
    bound = torch.finfo(dtype).eps / 2 + 72**0.5 * torch.finfo(torch.float32).eps / 2
    torch.manual_seed(rows)
    layer = torch.nn.Linear(72, 56).to(dtype)
    x, residual = torch.randn(rows, 72).to(dtype), torch.randn(rows, 56).to(dtype)
    cases: list[dict[str, Any]] = [{}, {"gelu": True}, {"residual": residual}]
    for extra in cases:
        exact = {name: value.double() if isinstance(value, torch.Tensor) else value for name, value in extra.items()}
        want = fused_linear(copy.deepcopy(layer).double(), x.double(), None, **exact)
        refresh_packed([layer], ONEDNN)
        plain, packed = fused_linear(layer, x, None, **extra), fused_linear(layer, x, ONEDNN, **extra)
        assert packed.dtype == dtype
        assert max(relative_error(plain, want), relative_error(packed, want)) < bound


def current(layer) -> torch.Tensor | None:
    packed = packed_copy(layer)
    return None if packed is None else packed.current


@needs_onednn
def test_W1_a_packed_layer_gives_the_plain_gradients_where_gradients_are_on():
    """oneDNN's product would give none, with no more than a warning."""
    layer, residual = torch.nn.Linear(72, 56), torch.randn(24, 56)
    with torch.no_grad():
        refresh_packed([layer], ONEDNN)
    cases: list[dict[str, Any]] = [{}, {"gelu": True}, {"residual": residual}]
    for extra in cases:
        x, same = (torch.ones(24, 72, requires_grad=True) for _ in range(2))
        fused_linear(layer, x, ONEDNN, **extra).square().sum().backward()
        fused_linear(layer, same, None, **extra).square().sum().backward()
        assert x.grad is not None and same.grad is not None
        assert same.grad.any() and torch.equal(x.grad, same.grad)


@needs_onednn
@torch.no_grad()
def test_a_layer_whose_weight_changes_meanwhile_computes_with_one_copy_or_the_other():
    """Another thread may pack a changed weight between any two lines of a product."""
    layer, x = torch.nn.Linear(72, 64), torch.randn(24, 72)
    refresh_packed([layer], ONEDNN)
    copied = packed_copy(layer)
    assert copied is not None and copied.current is not None
    before, seen = copied.current, []

    class Changing(PackedCopy):
        @property
        def current(self):
            seen.append(1)
            return before if len(seen) == 1 else None

        @current.setter
        def current(self, value):
            pass

    copied.__class__ = Changing
    assert torch.equal(fused_linear(layer, x, ONEDNN), ONEDNN.multiply(x, before, 64, layer.bias, None, False))
    assert seen == [1]


@needs_onednn
@torch.no_grad()
def test_the_old_copy_stays_until_the_new_one_is_packed(monkeypatch):
    layer = torch.nn.Linear(72, 64)
    refresh_packed([layer], ONEDNN)
    copied, while_packing = packed_copy(layer), []
    assert copied is not None and copied.kernel is not None
    kernel, old = copied.kernel, copied.current

    def pack(weight):
        while_packing.append(copied.current)
        return kernel.pack(weight)

    copied.kernel = replace(kernel, pack=pack)
    layer.weight.mul_(2)
    copied.refresh(layer.weight)
    assert while_packing[0] is old and copied.current is not old


def in_place(layer):
    layer.weight.mul_(-2)


def load(layer):
    layer.load_state_dict({"weight": layer.weight * 3, "bias": layer.bias})


def update_data(layer):
    layer.weight.data.mul_(3)


@needs_onednn
@pytest.mark.parametrize("change", [in_place, load, update_data], ids=lambda f: f.__name__)
@torch.no_grad()
def test_a_changed_weight_is_packed_anew(change):
    layer, x = torch.nn.Linear(72, 56), torch.randn(24, 72)
    refresh_packed([layer], ONEDNN)
    before = fused_linear(layer, x, ONEDNN)
    change(layer)
    refresh_packed([layer], ONEDNN)
    after = fused_linear(layer, x, ONEDNN)
    assert relative_error(after, layer(x)) < 1e-6
    assert relative_error(after, before) > 0.1


@needs_onednn
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
@torch.no_grad()
def test_the_packed_copy_is_never_copied_or_serialised(copied):
    layer, x = torch.nn.Linear(72, 56), torch.randn(24, 72)
    refresh_packed([layer], ONEDNN)
    want = fused_linear(layer, x, ONEDNN)
    twin = copied(layer)
    assert current(layer) is not None and current(twin) is None
    refresh_packed([twin], ONEDNN)
    assert torch.equal(fused_linear(twin, x, ONEDNN), want)
    assert set(layer.state_dict()) == {"weight", "bias"}


@needs_onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_the_tower_gives_the_same_with_prepacked_layers(dtype):
    pixels = pixels_for(MIXED_GRIDS)
    exact = tiny_tower(seed=4, options=EncoderOptions(attention="eager", linear="plain")).double()
    want = exact(pixels.double(), MIXED_GRIDS)
    error = {
        linear: relative_error(
            tiny_tower(seed=4, options=EncoderOptions(linear=linear)).to(dtype)(pixels, MIXED_GRIDS), want
        )
        for linear in ("plain", "prepacked")
    }
    assert error["prepacked"] < (1e-5 if dtype == torch.float32 else 1.2 * error["plain"])


def test_prepacked_layers_that_cannot_be_are_refused():
    tower = tiny_tower(options=EncoderOptions(linear="prepacked")).double()
    with torch.no_grad(), pytest.raises(ValueError, match="linear='prepacked'.*not torch.float64"):
        tower(pixels_for([(4, 6)]), [(4, 6)])
