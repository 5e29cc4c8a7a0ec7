"""Loading small checkpoints written in the published layout (faults J)."""

import json

import pytest
import torch
from safetensors.torch import save_file

from kimivl_lab import KimiVLConfig, KimiVLEncoder, MoonViTConfig, MoonVitPretrainedModel
from kimivl_lab.config import PRESETS, published_config
from tests.conftest import MIXED_GRIDS, pixels_for, tiny_encoder


def write_checkpoint(folder, tensors, config, shards=2):
    """Several safetensors files and their index, as the published checkpoint is laid out."""
    (folder / "config.json").write_text(json.dumps(config))
    names, weight_map = list(tensors), {}
    for shard in range(shards):
        part = names[shard::shards]
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name].contiguous() for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture
def published(tmp_path):
    """(folder, encoder, tensors): vision, projector and some language tensors under the published names."""
    encoder = tiny_encoder(seed=21)
    tensors = {name: value.clone() for name, value in encoder.state_dict().items()}
    tensors["language_model.lm_head.weight"] = torch.ones(4, 4)
    tensors["language_model.model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    write_checkpoint(tmp_path, tensors, encoder.config.to_dict())
    return tmp_path, encoder, tensors


def outputs(model, encode):
    with torch.no_grad():
        return encode(model)(pixels_for(MIXED_GRIDS), MIXED_GRIDS)


def test_published_names_load_one_to_one(published):
    folder, encoder, _ = published
    loaded = KimiVLEncoder.from_pretrained(folder).eval()
    assert torch.equal(
        outputs(loaded, lambda m: m.get_image_features), outputs(encoder, lambda m: m.get_image_features)
    )


def test_the_tower_loads_alone_from_a_full_checkpoint(published):
    folder, encoder, _ = published
    tower = MoonVitPretrainedModel.from_pretrained(folder).eval()
    assert tower.config.hidden_size == encoder.config.vision_config.hidden_size
    assert torch.equal(outputs(tower, lambda m: m), outputs(encoder.vision_tower, lambda m: m))


@pytest.mark.parametrize("model", [KimiVLEncoder, MoonVitPretrainedModel])
def test_J2_renamed_names_load(published, tmp_path_factory, model):
    _, encoder, tensors = published
    folder = tmp_path_factory.mktemp("renamed")
    renamed = {f"model.{name}" if "lm_head" not in name else "lm_head.weight": v for name, v in tensors.items()}
    write_checkpoint(folder, renamed, encoder.config.to_dict())
    loaded = model.from_pretrained(folder).eval()
    reference = encoder if model is KimiVLEncoder else encoder.vision_tower
    assert torch.equal(outputs(loaded, lambda m: m), outputs(reference, lambda m: m))


@pytest.mark.parametrize("model", [KimiVLEncoder, MoonVitPretrainedModel])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda t: t.pop("vision_tower.encoder.blocks.1.wqkv.bias"), r"missing: .*encoder\.blocks\.1\.wqkv\.bias"),
        (lambda t: t.update({"vision_tower.encoder.extra": torch.ones(2)}), r"unused: .*encoder\.extra"),
        (
            lambda t: t.update({"vision_tower.encoder.blocks.0.wo.bias": torch.ones(3)}),
            r"shape: .*wo\.bias \(3,\)",
        ),
        (
            lambda t: t.update(
                {"model.vision_tower.encoder.blocks.0.wo.bias": t["vision_tower.encoder.blocks.0.wo.bias"]}
            ),
            r"stored twice: .*wo\.bias",
        ),
    ],
    ids=["missing", "unused", "misshapen", "doubled"],
)
def test_J1_no_vision_tensor_is_silently_left_out(published, model, fault, message):
    folder, encoder, tensors = published
    fault(tensors)
    write_checkpoint(folder, tensors, encoder.config.to_dict())
    with pytest.raises(ValueError, match=message):
        model.from_pretrained(folder)


def test_a_folder_without_weights_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(KimiVLConfig.preset("tiny").to_dict()))
    with pytest.raises(ValueError, match="no model.safetensors"):
        KimiVLEncoder.from_pretrained(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_save_and_load_round_trip(tmp_path, dtype):
    encoder = tiny_encoder(seed=22).to(dtype)
    encoder.save_pretrained(tmp_path)
    loaded = KimiVLEncoder.from_pretrained(tmp_path, dtype=dtype).eval()
    assert loaded.dtype == dtype
    assert torch.equal(outputs(loaded, lambda m: m), outputs(encoder, lambda m: m))


def test_published_config_is_read_unchanged(tmp_path):
    published = published_config()
    (tmp_path / "config.json").write_text(json.dumps(published))
    config = KimiVLConfig.from_pretrained(tmp_path)
    for part, keys in (("vision_config", config.vision_config), ("text_config", config.text_config)):
        for key, value in published[part].items():
            if key in {"torch_dtype", "rope_theta", "rope_scaling", "model_type"}:
                continue
            got = getattr(keys, key)
            assert (list(got) if isinstance(got, tuple) else got) == value, (part, key)
    rope = config.text_config.rope_parameters or {}
    assert rope["rope_theta"] == published["text_config"]["rope_theta"]
    assert config.dtype == torch.bfloat16
    assert config.media_placeholder_token_id == 163605
    assert MoonViTConfig.from_pretrained(tmp_path).num_hidden_layers == 27
    config.save_pretrained(tmp_path / "again")
    assert KimiVLConfig.from_pretrained(tmp_path / "again").to_dict() == config.to_dict()


@pytest.mark.parametrize("name", PRESETS)
def test_presets_keep_the_head_size(name):
    vision = KimiVLConfig.preset(name).vision_config
    assert vision.head_dim == 72
    assert vision.num_attention_heads % 4 == 0
    assert vision.intermediate_size % 4 == 0


def test_J8_other_mathematics_is_refused():
    with pytest.raises(ValueError, match="quick_gelu"):
        MoonViTConfig(hidden_act="quick_gelu")
    with pytest.raises(ValueError, match="hidden_size 100 over 16 heads"):
        MoonViTConfig(hidden_size=100)
    with pytest.raises(ValueError, match="'huge'.*kimi-vl-a3b, lab, tiny"):
        MoonViTConfig.preset("huge")
