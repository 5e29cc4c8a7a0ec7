"""RoPE-2D: angles and rotations (faults D)."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimivl_lab import EncoderOptions
from kimivl_lab.kernels.rotation import ROPE_IMPLEMENTATIONS, resolve_rotation, rotate_complex
from kimivl_lab.moonvit.metadata import grid_arrays_reference
from kimivl_lab.moonvit.rope import Rope2DPosEmb
from tests import oracle
from tests.conftest import MIXED_GRIDS, pixels_for, relative_error, tiny_tower

EAGER = [name for name in ROPE_IMPLEMENTATIONS if name not in ("compiled", "amx")]  # "amx": tests/test_amx.py


def random_qk(rows, heads=3, dim=72, dtype=torch.float32):
    return torch.randn(rows, 3, heads, dim, generator=torch.Generator().manual_seed(rows)).to(dtype)[:, :2]


@settings(max_examples=25, deadline=None)
@given(h=st.integers(1, 511), w=st.integers(1, 40), data=st.data())
def test_D1_even_slots_turn_by_column_odd_by_row(h, w, data):
    factors = Rope2DPosEmb(72).get_freqs_cis_by_seqlens_list([(h, w)])
    assert factors.shape == (h * w, 36) and factors.dtype == torch.complex64
    y, x, i = data.draw(st.integers(0, h - 1)), data.draw(st.integers(0, w - 1)), data.draw(st.integers(0, 17))
    theta = 10000 ** (-4 * i / 72)
    for slot, position in ((2 * i, x), (2 * i + 1, y)):
        want = complex(math.cos(position * theta), math.sin(position * theta))
        assert abs(factors[y * w + x, slot].item() - want) < 5e-5


def test_D1_a_square_grid_hides_swapped_axes_and_a_long_one_does_not():
    rope = Rope2DPosEmb(72)
    x = random_qk(36)[:, 0]
    for (h, w), hidden in [((6, 6), True), ((2, 18), False)]:
        right = rope.get_freqs_cis_by_seqlens_list([(h, w)])
        swapped = right.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        # Swapped axes give the transposed picture its factors: on a square grid the same ones in another order.
        rotated = [rotate_complex(x[:, None], torch.view_as_real(f.contiguous())).flatten(1) for f in (right, swapped)]
        transposed = right.view(h, w, -1).transpose(0, 1).reshape(h * w, -1)
        assert torch.allclose(transposed, swapped, atol=1e-6) == hidden
        assert not torch.allclose(rotated[0], rotated[1])


def test_grids_are_packed_in_order_and_start_anew():
    rope = Rope2DPosEmb(72)
    parts = [rope.get_cos_sin([grid]) for grid in MIXED_GRIDS]
    assert torch.equal(rope.get_cos_sin(MIXED_GRIDS), torch.cat(parts))
    assert rope.get_cos_sin([]).shape == (0, 36, 2)


def test_float32_angles_are_exact_to_float32():
    rope = Rope2DPosEmb(72)
    grids = [(2, 510), (446, 12)]
    single, double = rope.get_cos_sin(grids), rope.get_cos_sin(grids, dtype=torch.float64)
    assert (single - double).abs().max() < 511 * 2**-23


@pytest.mark.parametrize("name", EAGER)
@pytest.mark.parametrize("grids", [[(4, 6), (2, 2)], [(20, 8)], [(2, 12)]], ids=str)
def test_implementations_equal_the_oracle(name, grids):
    qk = random_qk(sum(h * w for h, w in grids))
    cos_sin = Rope2DPosEmb(72).get_cos_sin(grids)
    want, start = [], 0
    for h, w in grids:
        want.append(torch.stack([oracle.rotate(qk[start : start + h * w, i], h, w) for i in (0, 1)], dim=1))
        start += h * w
    assert relative_error(ROPE_IMPLEMENTATIONS[name](qk.clone(), cos_sin), torch.cat(want)) < 1e-6


@pytest.mark.parametrize("name", EAGER)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_D5_dtype_in_is_dtype_out_within_rounding(name, dtype):
    qk = random_qk(130, dtype=dtype)
    cos_sin = Rope2DPosEmb(72).get_cos_sin([(13, 10)], dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    want = rotate_complex(qk, cos_sin)
    got = ROPE_IMPLEMENTATIONS[name](qk.clone(), cos_sin)
    assert got.dtype == dtype and got.shape == qk.shape
    assert relative_error(got, want) < torch.finfo(dtype).eps / 2
    if name == "in_place":
        assert torch.equal(got, want)


def test_in_place_writes_q_and_k_and_leaves_v():
    qkv = torch.randn(70, 3, 2, 72, generator=torch.Generator().manual_seed(0)).bfloat16()
    before = qkv.clone()
    cos_sin = Rope2DPosEmb(72).get_cos_sin([(7, 10)])
    ROPE_IMPLEMENTATIONS["in_place"](qkv[:, :2], cos_sin)
    assert torch.equal(qkv[:, 2], before[:, 2])
    assert torch.equal(qkv[:, :2], rotate_complex(before[:, :2], cos_sin))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=3))
def test_factors_gathered_from_the_kept_axis_are_the_reference_bit_for_bit(grids):
    rope = Rope2DPosEmb(72)
    positions = grid_arrays_reference(grids, len(grids), (1, 1))["positions"]
    for _ in range(2):  # makes the axis, then finds it
        assert torch.equal(rope.gather_cos_sin(positions, grids), rope.get_cos_sin(grids))
    assert rope.axes.stats.hits == rope.axes.stats.misses == 1


def test_scores_depend_on_relative_position_alone():
    rope = Rope2DPosEmb(72)
    q, k = torch.randn(2, 1, 1, 72, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def score(q_at, k_at):
        """Of q and k at (row, column) each."""
        positions = torch.tensor([q_at, k_at]).flip(1)  # (column, row)
        turned = rotate_complex(torch.stack((q, k)), rope.gather_cos_sin(positions, [(128, 64)], torch.float64))
        return (turned[0] * turned[1]).sum()

    assert torch.allclose(score((3, 5), (10, 7)), score((103, 45), (110, 47)))
    assert not torch.allclose(score((3, 5), (10, 7)), score((3, 5), (7, 10)))


@pytest.mark.parametrize("name", EAGER)
def test_the_tower_gives_the_same_with_each(name):
    pixels = pixels_for(MIXED_GRIDS)
    with torch.no_grad():
        want = tiny_tower(seed=2, options=EncoderOptions(rope="complex"))(pixels, MIXED_GRIDS)
        got = tiny_tower(seed=2, options=EncoderOptions(rope=name))(pixels, MIXED_GRIDS)
    assert relative_error(got, want) < 1e-6


def test_gradients_flow_when_wanted():
    tower = tiny_tower(seed=3)
    tower(pixels_for([(4, 6)]), [(4, 6)]).square().sum().backward()
    gradient = tower.get_parameter("encoder.blocks.0.wqkv.weight").grad
    assert gradient is not None and gradient.abs().sum() > 0


@pytest.mark.parametrize("name", [*EAGER, "amx"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_B1_a_rotation_that_writes_in_place_gives_the_references_gradient(name, dtype):
    grads = []
    for rotate in (rotate_complex, ROPE_IMPLEMENTATIONS[name]):
        qkv = torch.randn(130, 3, 2, 72, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
        turned = rotate((qkv * 1)[:, :2], Rope2DPosEmb(72).get_cos_sin([(13, 10)]))
        turned.float().mul(turned.detach().float().cos()).sum().backward()
        assert qkv.grad is not None
        grads.append(qkv.grad)
    assert relative_error(grads[1], grads[0]) < torch.finfo(dtype).eps


def test_errors_name_what_is_allowed():
    with pytest.raises(ValueError, match="multiple of 4, got 30"):
        Rope2DPosEmb(30)
    with pytest.raises(ValueError, match="grid 2x600 exceeds the largest, 512x512"):
        Rope2DPosEmb(72).get_cos_sin([(2, 600)])
    with pytest.raises(ValueError, match="'fast'.*complex, real, compiled, in_place"):
        resolve_rotation("fast", torch.device("cpu"), torch.float32)
