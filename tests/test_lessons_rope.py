"""What notebook 30 takes from the library: bytes by formula against bytes made, and faults that are faults."""

import pytest
import torch

from kimivl_lab.kernels.rotation import ROPE_IMPLEMENTATIONS
from kimivl_lab.lessons import rope_2d
from kimivl_lab.moonvit.rope import Rope2DPosEmb


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("way", ["complex", "real"])
def test_the_bytes_written_are_those_of_the_new_tensors(way, dtype):
    qkv = torch.randn(24, 3, 16, 72).to(dtype)
    cos_sin = Rope2DPosEmb(72).get_cos_sin([(4, 6)])
    made = rope_2d.new_bytes(lambda: ROPE_IMPLEMENTATIONS[way](qkv[:, :2], cos_sin))
    assert made == qkv[:, :2].numel() * sum(written for _, _, written in rope_2d.steps(way, dtype.itemsize))


def test_bytes_moved_adds_the_angles_once():
    assert rope_2d.bytes_a_number("complex") == 20 and rope_2d.bytes_a_number("in_place", 4) == 8
    cos_sin = Rope2DPosEmb(72).get_cos_sin([(2, 5)])
    assert rope_2d.bytes_moved("in_place", 10) == 4 * 10 * 2 * 16 * 72 + cos_sin.nbytes
    with pytest.raises(ValueError, match="'fused'"):
        rope_2d.steps("fused", 2)


def test_the_angles_are_those_of_the_factors():
    angles = torch.tensor(rope_2d.angles(3, 5, 72), dtype=torch.float64)
    factors = rope_2d.right_factors((4, 6))[3 * 6 + 5].to(torch.complex128)
    torch.testing.assert_close(torch.polar(torch.ones(36, dtype=torch.float64), angles), factors, atol=1e-6, rtol=0)


def test_each_fault_changes_the_factors_and_each_needs_its_own_look():
    grid = (2, 6)
    right = rope_2d.right_factors(grid)
    for words, factors_of in rope_2d.faulty_factors().items():
        faulty = factors_of(grid)
        assert faulty.shape == right.shape and not torch.equal(faulty, right), words

    def one_number(factors_of):  # looks at slot 0 of one patch only
        return abs(factors_of(grid)[1, 0] - right[1, 0]) < 1e-6

    assert rope_2d.axes_verdicts(one_number) == [True, False, False, True, False]
    assert rope_2d.axes_verdicts(lambda factors_of: None) is None
    assert rope_2d.axes_verdicts(lambda factors_of: torch.equal(factors_of(grid), right)) == [True] + 4 * [False]


def test_a_turn_in_place_is_judged_by_values_memory_and_new_bytes():
    def new(pairs, cos, sin):
        a, b = pairs.unbind(-1)
        return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1)

    def copied(pairs, cos, sin):
        return pairs.copy_(new(pairs, cos, sin))

    def with_new_first_number(pairs, cos, sin):
        a, b = pairs.unbind(-1)
        a.mul_(cos).addcmul_(b, sin, value=-1)
        b.mul_(cos).addcmul_(a, sin)
        return pairs

    assert rope_2d.in_place_verdicts(new) == (False, False, False)
    assert rope_2d.in_place_verdicts(copied) == (True, True, False)
    assert rope_2d.in_place_verdicts(with_new_first_number) == (False, True, True)
    assert rope_2d.in_place_verdicts(lambda *_: None) is None
