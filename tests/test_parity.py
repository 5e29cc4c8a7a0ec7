"""Against transformers' Kimi-K2.5 tower (t = 1, mapped weights), kornia's Kimi-VL, and the plain oracle."""

import pytest
import torch
from transformers.models.kimi_k25 import modeling_kimi_k25 as k25

from kimivl_lab import KimiVLConfig
from kimivl_lab.bench.peers import (
    grid_thw,
    halves_from_pairs,
    images_by_size,
    kimi_k25_tower,
    kornia_features,
    kornia_model,
)
from kimivl_lab.moonvit import attention
from tests import oracle
from tests.conftest import MIXED_GRIDS, pixels_for, randomise, relative_error, tiny_encoder, tiny_tower

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
BATCHES = [MIXED_GRIDS, [(64, 64)], [(66, 66)], [(2, 12), (64, 64), (4, 6), (66, 66)]]


def record_stages(tower, pixels, grids):
    """The library's intermediates under the oracle's names."""
    seen = {}

    def attend(q, k, v, metadata):
        seen.setdefault("q", q.clone())
        seen.setdefault("k", k.clone())
        return attention.sdpa_attention(q, k, v, metadata)

    attention.ATTENTION_BACKENDS["recording"] = attend
    tower.set_options(attention="recording")
    hooks = [
        tower.patch_embed.register_forward_hook(lambda m, i, o: seen.update(position=o)),
        tower.encoder.blocks[0].register_forward_hook(lambda m, i, o: seen.update(block0=o)),
        tower.encoder.final_layernorm.register_forward_hook(lambda m, i, o: seen.update(final_norm=o)),
    ]
    try:
        with torch.no_grad():
            seen["patch_embed"] = tower.patch_embed.project(pixels)
            seen["merged"] = tower(pixels, grids)
    finally:
        del attention.ATTENTION_BACKENDS["recording"]
        tower.set_options(attention="auto")
        for hook in hooks:
            hook.remove()
    return seen


def peer_stages(peer, pixels, grids, monkeypatch):
    seen = {}
    rotate = k25.apply_rotary_pos_emb_vision

    def recording(q, k, cos, sin):
        q, k = rotate(q, k, cos, sin)
        seen.setdefault("q", q[0])
        seen.setdefault("k", k[0])
        return q, k

    monkeypatch.setattr(k25, "apply_rotary_pos_emb_vision", recording)
    hooks = [
        peer.patch_embed.proj.register_forward_hook(lambda m, i, o: seen.update(patch_embed=o.flatten(1))),
        peer.patch_embed.register_forward_hook(lambda m, i, o: seen.update(position=o)),
        peer.layers[0].register_forward_hook(lambda m, i, o: seen.update(block0=o)),
    ]
    with torch.no_grad():
        out = peer(pixels, grid_thw=grid_thw(grids))
    for hook in hooks:
        hook.remove()
    return seen | {"final_norm": out.last_hidden_state, "merged": out.pooler_output}


@pytest.mark.parametrize("grids", BATCHES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_stages_equal_transformers(grids, dtype, monkeypatch):
    tower = tiny_tower(seed=3).to(dtype)
    pixels = pixels_for(grids, seed=4, dtype=dtype)
    ours = record_stages(tower, pixels, grids)
    theirs = peer_stages(kimi_k25_tower(tower), pixels, grids, monkeypatch)
    for name in ("q", "k"):  # their rotation works on halves: bring ours into that order
        ours[name] = halves_from_pairs(ours[name].transpose(0, 1).transpose(1, 2).flatten(0, 1), ours[name].shape[1])
        theirs[name] = theirs[name].permute(1, 2, 0).flatten(0, 1)
    # Their angles and table weights are float32 whatever the dtype, so float64 agrees to float32's accuracy only.
    errors = {stage: relative_error(ours[stage], theirs[stage]) for stage in oracle.STAGES}
    assert max(errors.values()) <= TOLERANCE[torch.float32], errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_stages_equal_the_oracle(dtype):
    tower = tiny_tower(seed=5).to(dtype)
    pixels = pixels_for(MIXED_GRIDS, seed=6, dtype=dtype)
    ours = record_stages(tower, pixels, MIXED_GRIDS)
    want = oracle.stages(tower.state_dict(), tower.config, pixels, MIXED_GRIDS)
    errors = {stage: relative_error(ours[stage], want[stage]) for stage in oracle.STAGES}
    assert max(errors.values()) <= TOLERANCE[dtype], errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_projector_equals_the_oracle_and_transformers(dtype):
    encoder = tiny_encoder(seed=7).to(dtype)
    pixels = pixels_for(MIXED_GRIDS, seed=8, dtype=dtype)
    weights = encoder.multi_modal_projector.state_dict()
    with torch.no_grad():
        merged = encoder.vision_tower(pixels, MIXED_GRIDS)
        projected = encoder.get_image_features(pixels, MIXED_GRIDS)
    assert projected.shape == (merged.shape[0], encoder.config.text_config.hidden_size)
    assert relative_error(projected, oracle.project(weights, merged)) <= TOLERANCE[dtype]

    names = {"pre_norm": "pre_norm", "linear_1": "in_proj", "linear_2": "out_proj"}
    config = k25.Kimi_K25Config(
        vision_config=kimi_k25_tower(encoder.vision_tower).config,
        text_config={"model_type": "deepseek_v3", "hidden_size": encoder.config.text_config.hidden_size},
        projection_hidden_size=encoder.config.vision_config.hidden_size,
    )
    peer = k25.Kimi_K25MultimodalProjection(config).to(dtype)
    peer.load_state_dict({f"{names[key.split('.')[0]]}.{key.split('.')[1]}": value for key, value in weights.items()})
    with torch.no_grad():
        assert relative_error(projected, peer(merged).squeeze(1)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("grids", [MIXED_GRIDS, [(64, 64)], [(2, 12), (12, 2), (2, 12)]], ids=str)
def test_features_and_projector_equal_kornia(grids):
    pytest.importorskip("kornia.models.kimi_vl")
    encoder = tiny_encoder(seed=15)
    tower = encoder.vision_tower
    pixels = pixels_for(grids, seed=16)
    batches = images_by_size(pixels, grids)
    with torch.no_grad():
        peer = kornia_model(tower, encoder.multi_modal_projector)
        assert relative_error(tower(pixels, grids), kornia_features(peer, batches)) <= TOLERANCE[torch.float32]
        projected = kornia_features(peer, batches, projected=True)
        assert relative_error(encoder.get_image_features(pixels, grids), projected) <= TOLERANCE[torch.float32]
        turned = images_by_size(pixels, [(w, h) for h, w in grids])
        other = kornia_features(peer, turned, projected=True)
    if any(h != w for h, w in grids):
        assert relative_error(other, projected) > 1e-3, "rows taken for columns must be seen"


@pytest.mark.parametrize("backend", ["sdpa_masked", "eager"])
def test_attention_backends_agree(backend):
    tower = tiny_tower(seed=9)
    pixels = pixels_for(MIXED_GRIDS, seed=10)
    with torch.no_grad():
        want = tower(pixels, MIXED_GRIDS)
        tower.set_options(attention=backend)
        assert relative_error(tower(pixels, MIXED_GRIDS), want) <= 1e-5


def test_a_control_the_parity_test_must_reject():
    """Rows and columns swapped in the rope is invisible on a square grid and must be seen on a (2, 12) one."""
    tower = tiny_tower(seed=11)
    pixels = pixels_for([(2, 12)], seed=12)
    angles = tower.rope_2d.get_cos_sin
    with torch.no_grad():
        want = tower(pixels, [(2, 12)])
        swapped = tower.prepare_encoder_metadata([(2, 12)])
        transposed = angles([(12, 2)]).view(12, 2, -1, 2).transpose(0, 1).reshape(24, -1, 2)
        object.__setattr__(swapped, "rope_cos_sin", transposed)
        assert relative_error(tower(pixels, encoder_metadata=swapped), want) > 1e-3


def test_full_preset_materialises_from_meta_with_nothing_uninitialised():
    config = KimiVLConfig.preset("kimi-vl-a3b").vision_config
    with torch.device("meta"):
        tower = type(tiny_tower())(config)
    assert sum(parameter.numel() for parameter in tower.parameters()) == 416_866_032
    assert not list(tower.buffers())
    small = tiny_tower(seed=13)
    with torch.device("meta"):
        empty = type(small)(small.config)
    empty = randomise(empty.to_empty(device="cpu"), seed=13).eval()
    pixels = pixels_for(MIXED_GRIDS, seed=14)
    with torch.no_grad():
        assert torch.equal(empty(pixels, MIXED_GRIDS), small(pixels, MIXED_GRIDS))
