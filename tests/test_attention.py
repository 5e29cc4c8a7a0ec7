"""Packed attention and the fused linear layers (faults E, H7)."""

import copy
import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kimivl_lab import EncoderOptions, MoonViTConfig, MoonVitPretrainedModel
from kimivl_lab.kernels.packed_linear import GELU_TANH, PACKED_KERNELS, FusedLinear, packed_unavailable, refresh_packed
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


def test_the_operator_passes_torch_librarys_own_checks():
    metadata = metadata_for(MIXED_GRIDS)
    arguments = (*qkv(metadata.num_patches), metadata.cu_seqlens, metadata.max_seqlen, "sdpa")
    torch.library.opcheck(packed_attention, arguments, test_utils=("test_schema", "test_faketensor"))


def test_gradients_flow_through_every_cpu_backend():
    metadata = metadata_for(MIXED_GRIDS)
    for backend in CPU:
        tensors = [x.clone().requires_grad_() for x in qkv(metadata.num_patches)]
        ATTENTION_BACKENDS[backend](*tensors, metadata).square().sum().backward()
        assert all(x.grad is not None and x.grad.abs().sum() > 0 for x in tensors)


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
    sqrt(72 / 6) units of rounding, and storing the result adds one unit of `dtype`. At one row one
    product's error may be several times another's, so neither bounds the other."""
    bound = torch.finfo(dtype).eps / 2 + 72**0.5 * torch.finfo(torch.float32).eps / 2
    torch.manual_seed(rows)
    layer = FusedLinear(72, 56).to(dtype)
    x, residual = torch.randn(rows, 72).to(dtype), torch.randn(rows, 56).to(dtype)
    for extra in ({}, {"activation": GELU_TANH}, {"residual": residual}):
        exact = {name: value.double() if isinstance(value, torch.Tensor) else value for name, value in extra.items()}
        want = copy.deepcopy(layer).double()(x.double(), **exact)
        refresh_packed(layer, ONEDNN)
        plain, packed = layer(x, **extra), layer(x, **extra, kernel=ONEDNN)
        assert packed.dtype == dtype
        assert max(relative_error(plain, want), relative_error(packed, want)) < bound


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
    layer, x = FusedLinear(72, 56), torch.randn(24, 72)
    refresh_packed(layer, ONEDNN)
    before = layer(x, kernel=ONEDNN)
    change(layer)
    refresh_packed(layer, ONEDNN)
    after = layer(x, kernel=ONEDNN)
    assert relative_error(after, layer(x)) < 1e-6
    assert relative_error(after, before) > 0.1


@needs_onednn
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
@torch.no_grad()
def test_the_packed_copy_is_never_copied_or_serialised(copied):
    layer, x = FusedLinear(72, 56), torch.randn(24, 72)
    refresh_packed(layer, ONEDNN)
    want = layer(x, kernel=ONEDNN)
    twin = copied(layer)
    assert layer.packed.current is not None and twin.packed.current is None
    refresh_packed(twin, ONEDNN)
    assert torch.equal(twin(x, kernel=ONEDNN), want)
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
    tower.set_options(linear="packed")
    with pytest.raises(ValueError, match="'packed': auto, plain, amx or prepacked"):
        tower(pixels_for([(4, 6)]), [(4, 6)])
