"""A tower of half precision that computes in float32: nearer to float64, never stale, plain where it is touched."""

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kimivl_lab import EncoderCudaGraphRunner, EncoderOptions
from kimivl_lab.kernels import precision
from kimivl_lab.kernels.packed_linear import RAISED, are_packed, packed_copy
from kimivl_lab.moonvit import layers
from tests.conftest import MIXED_GRIDS, pixels_for, relative_error, tiny_tower

FLOAT32, WEIGHTS = EncoderOptions(compute="float32"), EncoderOptions(compute="weights")

PLAIN = EncoderOptions(attention="sdpa", linear="plain", compute="weights")


def half_tower(options, dtype=torch.bfloat16, seed=4):
    return tiny_tower(seed, options).to(dtype)


@torch.no_grad()
def encode(tower, seed=0):
    return tower(pixels_for(MIXED_GRIDS, seed), MIXED_GRIDS)


def is_raised(tower):
    return are_packed(tower.encoder._linears(), RAISED)


@pytest.mark.parametrize("dtype", precision.HALF, ids=str)
@torch.no_grad()
def test_the_result_is_nearer_to_float64_in_the_towers_dtype(dtype):
    tower = half_tower(FLOAT32, dtype)
    want = copy.deepcopy(tower).double()
    want.set_options(attention="eager", linear="plain", compute="weights")
    want, got = encode(want), encode(tower)
    assert got.dtype == dtype and is_raised(tower)
    assert relative_error(got, want) < 0.7 * relative_error(encode(half_tower(WEIGHTS, dtype)), want)


@pytest.mark.parametrize("kind", [torch.uint8, torch.float64], ids=str)
@torch.no_grad()
def test_pixels_of_any_kind(kind):
    pixels = (pixels_for(MIXED_GRIDS) * 40 + 128).clamp(0, 255).to(kind)
    want = half_tower(WEIGHTS)(pixels, MIXED_GRIDS)
    assert relative_error(half_tower(FLOAT32)(pixels, MIXED_GRIDS), want) < 0.02


@torch.no_grad()
def test_auto_does_what_the_measurement_says(monkeypatch):
    for pays, options in ((True, WEIGHTS), (False, FLOAT32)):
        monkeypatch.setattr(layers, "half_pays", lambda dtype, pays=pays: pays)
        assert torch.equal(encode(half_tower(EncoderOptions(linear="prepacked"))), encode(half_tower(options)))
        assert torch.equal(encode(tiny_tower(4)), encode(tiny_tower(4, WEIGHTS))), "float32 is computed as it is"


def test_the_measurement_touches_no_mode_and_no_random_state():
    state = torch.get_rng_state()
    with FakeTensorMode(), torch.device("meta"):
        assert precision.half_pays.__wrapped__(torch.bfloat16) in (True, False)
    assert torch.equal(torch.get_rng_state(), state)


@torch.no_grad()
def test_a_changed_weight_is_seen_checked_or_announced():
    for options in (FLOAT32, EncoderOptions(compute="float32", weights="announced")):
        tower = half_tower(options)
        before = encode(tower)
        for part in ("encoder.blocks.1.mlp.fc0.weight", "encoder.blocks.0.wo.bias", "encoder.blocks.0.norm1.weight"):
            tower.get_parameter(part).data.mul_(2)
        tower.weights_changed()
        fresh = half_tower(options)
        fresh.load_state_dict(tower.state_dict())
        assert torch.equal(encode(tower), encode(fresh)) and relative_error(encode(tower), before) > 0.01


@torch.no_grad()
def test_graphs_replay_it_and_see_a_changed_weight():
    tower, pixels = half_tower(FLOAT32), pixels_for(MIXED_GRIDS)
    runner = EncoderCudaGraphRunner(tower, [32], max_images=4)
    assert torch.equal(runner(pixels, MIXED_GRIDS), encode(tower))
    tower.encoder.blocks[1].mlp.fc1.weight.data.mul_(3)
    assert torch.equal(runner(pixels, MIXED_GRIDS), encode(tower)) and not runner.stats.eager


@torch.no_grad()
def test_a_touched_layer_sees_and_gives_what_plain_pytorch_would():
    want, tower = encode(half_tower(WEIGHTS)), half_tower(FLOAT32)
    raised, seen = encode(tower), []
    for path in ("encoder.blocks.0.norm0", "encoder.blocks.1.mlp", "encoder.blocks.1.wo", "encoder.final_layernorm"):
        hook = tower.get_submodule(path).register_forward_hook(
            lambda module, args, out: seen.append((args[0].dtype, out.dtype))
        )
        touched = encode(tower)
        hook.remove()
        assert seen.pop() == (torch.bfloat16, torch.bfloat16) and not seen
        assert relative_error(touched, want) < 0.02 and not torch.equal(touched, raised), path
        assert torch.equal(encode(tower), raised)

    class Doubled(torch.nn.Linear):
        def forward(self, input):
            assert input.dtype == torch.bfloat16
            return super().forward(input) * 2

    layer = tower.encoder.blocks[0].mlp.fc1
    layer.__class__ = Doubled
    assert relative_error(encode(tower), want) > 0.01


def test_with_gradients_the_weights_own_dtype_computes():
    tower = half_tower(FLOAT32)
    out = tower(pixels_for(MIXED_GRIDS), MIXED_GRIDS)
    out.float().sum().backward()
    assert torch.equal(out, half_tower(WEIGHTS)(pixels_for(MIXED_GRIDS), MIXED_GRIDS))
    assert tower.encoder.blocks[0].wqkv.weight.grad.abs().sum() > 0


@torch.no_grad()
def test_raised_copies_take_four_bytes_a_weight_and_go_when_they_are_not_wanted():
    tower = half_tower(FLOAT32)
    layer = tower.encoder.blocks[0].wqkv
    for compute, size in (("float32", 4), ("weights", 2), ("float32", 4)):
        tower.set_options(compute=compute, linear="prepacked")
        encode(tower)
        copies = packed_copy(layer)
        assert copies is not None and copies.current is not None and copies.current.element_size() == size
    tower.set_options(compute="weights", linear="plain")
    assert packed_copy(layer) is None


@torch.no_grad()
def test_the_dtype_and_the_kernels_that_compute_are_named():
    for options, dtype, linear in ((FLOAT32, torch.float32, "prepacked"), (PLAIN, torch.bfloat16, "plain")):
        tower = half_tower(options)
        assert tower.layer_dtype() == dtype
        said = tower.resolve_options().names(tower.dtype)
        assert str(dtype).endswith(said.partition(":")[0]) and f"linear {linear}," in said


def test_choices_that_cannot_be_are_refused():
    for options, message in (
        (EncoderOptions(compute="float64"), "'float64': one of auto, weights, float32"),
        (EncoderOptions(compute="float32", linear="plain"), "compute='float32': linear='plain' does not raise"),
    ):
        with pytest.raises(ValueError, match=message):
            encode(half_tower(options))
    with pytest.raises(ValueError, match="compute='float32': oneDNN prepacks for CPUs, not for cuda"), torch.no_grad():
        layers.ResolvedOptions.resolve(FLOAT32, torch.device("cuda"), torch.bfloat16)
