"""Position embedding: four implementations against the float64 oracle (faults C)."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kimivl_lab.moonvit.position import POSITION_OPERATORS, Learnable2DInterpPosEmb, axis_taps
from tests import oracle
from tests.conftest import relative_error

GRIDS = [(36, 46), (2, 510), (446, 12), (1, 1), (66, 66), (4, 40), (128, 128), (2, 512), (64, 64), (63, 64)]
IMPLEMENTATIONS = [*POSITION_OPERATORS, "cached"]

# torch's own float32 bicubic rounds each source coordinate to float32, up to 64 * 2^-24 of a table cell; ours does not.
TOLERANCE = {"interpolate": 5e-6}


def table(dim=16, dtype=torch.float32, seed=0, height=64, width=64):
    module = Learnable2DInterpPosEmb(height, width, dim)
    with torch.no_grad():
        module.weight.copy_(torch.randn(height, width, dim, generator=torch.Generator().manual_seed(seed)))
    return module.to(dtype).eval().requires_grad_(False)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_C1_C2_equals_the_float64_oracle(grid, implementation):
    module = table()
    want = oracle.position(module.weight.double(), *grid)
    got = module.get_pos_embeds([grid], implementation=implementation)
    assert relative_error(got, want) < TOLERANCE.get(implementation, 1e-6)


@settings(max_examples=40, deadline=None)
@given(
    grid=st.tuples(st.integers(1, 200), st.integers(1, 200)),
    size=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    implementation=st.sampled_from(list(POSITION_OPERATORS)),
)
def test_any_grid_from_any_table(grid, size, implementation):
    module = table(dim=3, height=size[0], width=size[1])
    want = oracle.position(module.weight.double(), *grid)
    got = module.get_pos_embeds([grid], implementation=implementation)
    assert relative_error(got, want) < TOLERANCE.get(implementation, 1e-6)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda P, grid: F.interpolate(P, size=grid, mode="bicubic", align_corners=True),
        lambda P, grid: F.interpolate(P, size=grid, mode="bicubic", antialias=True),
        lambda P, grid: F.interpolate(P, size=grid, mode="bilinear"),
    ],
    ids=["align_corners", "antialias", "bilinear"],
)
def test_controls_that_the_oracle_must_tell_apart(wrong):
    module, grid = table(), (4, 40)
    got = wrong(module.weight.permute(2, 0, 1)[None], grid)[0].permute(1, 2, 0).flatten(0, 1)
    assert relative_error(got, oracle.position(module.weight.double(), *grid)) > 1e-2


def test_a_wrong_kernel_constant_is_seen_off_the_native_grid(monkeypatch):
    monkeypatch.setattr("kimivl_lab.moonvit.position.KEYS_CONSTANT", -0.5)
    module = table()
    for implementation in ("gather", "separable"):
        got = module.get_pos_embeds([(36, 46)], implementation=implementation)
        assert relative_error(got, oracle.position(module.weight.double(), 36, 46)) > 1e-3


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_packs_images_in_order(implementation):
    module, grids = table(), [(4, 6), (6, 4), (64, 64), (2, 10)]
    packed = module.get_pos_embeds(grids, implementation=implementation)
    for part, grid in zip(packed.split([h * w for h, w in grids]), grids, strict=True):
        want = oracle.position(module.weight.double(), *grid)
        assert relative_error(part, want) < TOLERANCE.get(implementation, 1e-6)
    assert module.get_pos_embeds([], implementation=implementation).shape == (0, 16)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_C6_C8_float32_inside_one_cast(dtype, implementation):
    module = table(dtype=dtype)
    got = module.get_pos_embeds([(36, 46)], implementation=implementation)
    assert got.dtype == dtype
    want = oracle.position(module.weight.double(), 36, 46).to(dtype)
    assert (got == want).float().mean() > 0.98  # a rounding at a tie may differ; a low-precision sum would not be close
    assert relative_error(got, want) < torch.finfo(dtype).eps / 8


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_caller_owns_the_result(implementation):
    module = table()
    for grid in [(64, 64), (8, 6)]:
        before = module.weight.clone()
        first = module.get_pos_embeds([grid], implementation=implementation)
        kept = first.clone()
        first.fill_(7)
        assert torch.equal(module.weight, before)
        assert torch.equal(module.get_pos_embeds([grid], implementation=implementation), kept)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_reach_the_table(implementation):
    module = table().requires_grad_()
    coefficients = torch.randn(24, 16, generator=torch.Generator().manual_seed(1))
    (module.get_pos_embeds([(4, 6)], implementation=implementation) * coefficients).sum().backward()
    rows, columns = oracle.axis_matrix(4, 64), oracle.axis_matrix(6, 64)
    want = torch.einsum("yi,xj,yxd->ijd", rows, columns, coefficients.view(4, 6, 16).double())
    assert module.weight.grad is not None
    assert relative_error(module.weight.grad, want) < 1e-5


def test_C5_taps_sum_to_one_and_stay_inside():
    for out_size in (1, 2, 63, 64, 65, 511):
        index, weight = axis_taps(out_size, 64, torch.float32, "cpu")
        assert index.shape == weight.shape == (out_size, 4)
        assert index.min() >= 0 and index.max() <= 63
        assert torch.allclose(weight.sum(-1), torch.ones(out_size), atol=1e-6)


def test_C12_axis_taps_stay_small_over_every_grid_side():
    module = table(dim=2)
    for side in range(1, 512):
        module._taps(torch.float32, torch.device("cpu"), side, 64)
    assert module.axes.stats.bytes <= module.axes.max_bytes == 4 * 2**20


def test_unknown_implementation_lists_the_known():
    with pytest.raises(ValueError, match="'bilinear'.*interpolate, gather, separable, adaptive, cached"):
        table().get_pos_embeds([(2, 2)], implementation="bilinear")
