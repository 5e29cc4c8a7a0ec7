"""Checkpoints that are damaged, doubled or of another model: a ValueError that names the file, never another value."""

import json
import logging
import shutil

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from kimivl_lab import KimiVLConfig, KimiVLEncoder, MoonViTConfig, MoonVitPretrainedModel
from kimivl_lab.commands.main import main
from tests.conftest import MIXED_GRIDS, pixels_for, tiny_encoder
from tests.test_checkpoint import write_checkpoint

MODELS = [KimiVLEncoder, MoonVitPretrainedModel]
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
NAME = "vision_tower.encoder.blocks.0.wo.bias"


@pytest.fixture
def published(tmp_path):
    """(folder, encoder, tensors): two shards and their index, under the published names."""
    encoder = tiny_encoder(seed=21)
    tensors = {name: value.clone() for name, value in encoder.state_dict().items()}
    tensors["language_model.lm_head.weight"] = torch.ones(4, 4)
    write_checkpoint(tmp_path, tensors, encoder.config.to_dict())
    return tmp_path, encoder, tensors


def encode(model):
    with torch.no_grad():
        return model(pixels_for(MIXED_GRIDS), MIXED_GRIDS)


def home_of(folder, name=NAME):
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    return weight_map[name], next(file for file in (FIRST, SECOND) if file != weight_map[name])


def add(file, tensors):
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})


# --- what is checked is what is loaded -------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("copy", [NAME, f"model.{NAME}"], ids=["same name", "other prefix"])
def test_a_stale_copy_in_another_shard_is_refused(published, model, copy):
    folder, _, tensors = published
    home, other = home_of(folder)
    add(folder / other, {copy: tensors[NAME] + 1})
    with pytest.raises(ValueError) as error:
        model.from_pretrained(folder)
    for part in (NAME.removeprefix("vision_tower."), home, other):
        assert part in str(error.value)


@pytest.mark.parametrize("model", MODELS)
def test_a_tensor_in_another_file_than_the_index_names_is_refused(published, model):
    folder, _, tensors = published
    home, other = home_of(folder)
    rest = {name: value for name, value in load_file(folder / home).items() if name != NAME}
    save_file(rest, folder / home, metadata={"format": "pt"})
    add(folder / other, {NAME: tensors[NAME]})
    with pytest.raises(ValueError, match=rf"{NAME} \(in {other}, the index names {home}\)"):
        model.from_pretrained(folder)


def test_a_tensor_that_the_index_does_not_name_is_refused(published):
    folder, _, tensors = published
    index = json.loads((folder / INDEX).read_text())
    home = index["weight_map"].pop(NAME)
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"{NAME} \(in {home}, the index names no file\)"):
        KimiVLEncoder.from_pretrained(folder)


def test_a_tensor_that_the_index_names_in_vain_is_refused(published):
    folder, *_ = published
    home, _ = home_of(folder)
    rest = {name: value for name, value in load_file(folder / home).items() if name != NAME}
    save_file(rest, folder / home, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"{NAME} \(not in {home}\)"):
        KimiVLEncoder.from_pretrained(folder)


def test_what_belongs_to_the_language_model_is_left_alone(published):
    folder, encoder, tensors = published
    name = "language_model.lm_head.weight"
    add(folder / home_of(folder, name)[1], {name: tensors[name] * 2})
    assert torch.equal(encode(KimiVLEncoder.from_pretrained(folder).eval()), encode(encoder))


@pytest.mark.parametrize("model", MODELS)
def test_a_single_file_beside_an_index_is_the_one_that_is_checked_and_loaded(published, model):
    folder, encoder, tensors = published
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    (folder / INDEX).write_text("{}")  # stale, and not read
    for shard in (FIRST, SECOND):
        (folder / shard).write_bytes(b"")
    reference = encoder if model is KimiVLEncoder else encoder.vision_tower
    assert torch.equal(encode(model.from_pretrained(folder).eval()), encode(reference))
    add(folder / SINGLE, {f"model.{NAME}": tensors[NAME] + 1})
    with pytest.raises(ValueError, match=rf"stored twice.*{SINGLE}.*{SINGLE}"):
        model.from_pretrained(folder)


@pytest.mark.parametrize(
    "arguments",
    [{"variant": "fp16"}, {"gguf_file": "model.gguf"}, {"state_dict": {}}, {"use_safetensors": False}],
    ids=lambda arguments: next(iter(arguments)),
)
def test_arguments_that_would_load_other_files_are_refused(published, arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        KimiVLEncoder.from_pretrained(published[0], **arguments)


def test_a_distributed_checkpoint_in_the_folder_is_refused(published):
    folder, *_ = published
    shutil.copy(folder / FIRST, folder / "shard-00000-model-00001-of-00001.safetensors")
    with pytest.raises(ValueError, match="shard-00000-model"):
        KimiVLEncoder.from_pretrained(folder)


def test_an_adapter_in_the_folder_is_refused_not_followed_to_another_base(published):
    folder, encoder, _ = published
    other = folder / "other"
    tiny_encoder(seed=5).save_pretrained(other)
    config = {"peft_type": "LORA", "base_model_name_or_path": str(other), "target_modules": ["wqkv"], "r": 4}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"adapter_config\.json.*peft"):
        KimiVLEncoder.from_pretrained(folder)


def test_pickled_weights_are_never_loaded(published):
    folder, _, tensors = published
    for name in (FIRST, SECOND, INDEX):
        (folder / name).unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=rf"no {SINGLE}"):
        KimiVLEncoder.from_pretrained(folder)


# --- damaged files ---------------------------------------------------------------------------------------------------

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 4980000000\n"


def truncated(file):
    file.write_bytes(file.read_bytes()[:-100])


def cut_in_the_header(file):
    file.write_bytes(file.read_bytes()[:60])


def empty(file):
    file.write_bytes(b"")


def pointer(file):
    file.write_bytes(POINTER)


def text(file):
    file.write_text("<html>404 Not Found</html>")


def endless_header(file):
    file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])


def missing(file):
    file.unlink()


def folder_in_its_place(file):
    file.unlink()
    file.mkdir()


DAMAGES = [truncated, cut_in_the_header, empty, pointer, text, endless_header, missing, folder_in_its_place]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("file", [SECOND, SINGLE])
def test_a_damaged_file_is_named(published, model, damage, file):
    folder, _, tensors = published
    if file == SINGLE:
        save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
        (folder / INDEX).unlink()
    damage(folder / file)
    with pytest.raises(ValueError, match=file.replace(".", r"\.")) as error:
        model.from_pretrained(folder)
    assert ("git lfs pull" in str(error.value)) == (damage is pointer)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "content",
    [
        *("", "{}", "[]", "null", "{", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": {"a": 1}}'),
        *('{"weight_map": {"a": "../other.safetensors"}}', '{"weight_map": {"a": "/etc/passwd"}}'),
        *('{"weight_map": {"a": "model.bin"}}', "[" * 100_000, "\ud800".encode("utf-8", "surrogatepass")),
    ],
    ids=range(13),
)
def test_a_damaged_index_is_named(published, model, content):
    folder, *_ = published
    (folder / INDEX).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=INDEX.replace(".", r"\.")):
        model.from_pretrained(folder)


def test_a_file_given_as_the_folder_is_named(published):
    with pytest.raises(ValueError, match=f"{FIRST} is a file"):
        KimiVLEncoder.from_pretrained(published[0] / FIRST)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_the_command_line_says_it_in_one_line(published, damage, capsys):
    folder, *_ = published
    damage(folder / SECOND)
    Image.new("RGB", (56, 56)).save(folder / "image.png")
    out = folder / "out.safetensors"
    code = main(["encode", str(folder / "image.png"), "--checkpoint", str(folder), "--out", str(out)])
    said = capsys.readouterr().err.strip().splitlines()
    assert code == 2 and len(said) == 1 and SECOND in said[0]
    assert not out.exists()


@pytest.mark.parametrize("fault", ["missing", "none"])
def test_transformers_report_is_not_printed_before_our_error(published, fault, caplog):
    folder, encoder, tensors = published
    if fault == "missing":
        write_checkpoint(folder, {n: t for n, t in tensors.items() if n != NAME}, encoder.config.to_dict())
    log = logging.getLogger("transformers")
    log.addHandler(caplog.handler)
    try:
        if fault == "missing":
            with pytest.raises(ValueError, match=NAME):
                KimiVLEncoder.from_pretrained(folder)
        else:
            KimiVLEncoder.from_pretrained(folder)
    finally:
        log.removeHandler(caplog.handler)
    assert not [record for record in caplog.records if "REPORT" in record.getMessage()]


# --- configurations of other models ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key, value",
    [
        *(("rope_theta", 1e6), ("rope_scaling", {"type": "linear", "factor": 2}), ("interpolation_mode", "bilinear")),
        *(("activation_func", "relu"), ("hidden_act", "gelu"), ("num_channels", 1), ("qkv_bias", False)),
        *(("head_dim", 64), ("num_key_value_heads", 1), ("model_type", "moonvit3d"), ("pos_emb_time", 4)),
        *(("norm_type", "rmsnorm"), ("attention_dropout", 0.1), ("attn_implementation", "sdpa")),
        *(("attn_implementation", "eager"), ("hidden_size", 0), ("num_attention_heads", 0), ("patch_size", -14)),
        *(("num_hidden_layers", True), ("merge_kernel_size", [2]), ("merge_kernel_size", 0)),
        *(("dtype", "float12"), ("torch_dtype", "cuda")),
    ],
)
def test_a_vision_config_of_other_mathematics_is_refused(published, key, value):
    folder, encoder, _ = published
    tiny = encoder.config.vision_config.to_dict()
    with pytest.raises(ValueError, match=key):
        MoonViTConfig(**{**tiny, key: value})
    config = encoder.config.to_dict()
    config["vision_config"][key] = value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="vision_config" if key == "model_type" else key):
        KimiVLEncoder.from_pretrained(folder)


@pytest.mark.parametrize(
    "key, value",
    [
        *(("head_dim", 72), ("rope_theta", 10000.0), ("rope_scaling", None), ("interpolation_mode", "bicubic")),
        *(("activation_func", "gelu_pytorch_tanh"), ("num_channels", 3), ("num_key_value_heads", 4)),
        *(("attention_dropout", 0.0), ("attn_implementation", None), ("a_key_of_the_future", {"a": 1})),
    ],
)
def test_a_vision_config_that_says_the_same_loads(published, key, value):
    folder, encoder, _ = published
    config = encoder.config.to_dict()
    config["vision_config"][key] = value
    (folder / "config.json").write_text(json.dumps(config))
    for model, reference in ((KimiVLEncoder, encoder), (MoonVitPretrainedModel, encoder.vision_tower)):
        loaded = model.from_pretrained(folder).eval()
        assert torch.equal(encode(loaded), encode(reference))
    if key == "a_key_of_the_future":
        assert loaded.config.a_key_of_the_future == value


@pytest.mark.parametrize(
    "key, value", [("hidden_act", "relu"), ("merge_kernel_size", (2, 0)), ("num_attention_heads", 5)]
)
def test_an_argument_of_from_pretrained_that_changes_the_mathematics_is_refused(published, key, value):
    with pytest.raises(ValueError, match=key.replace("num_attention_heads", "over 5 heads")):
        MoonVitPretrainedModel.from_pretrained(published[0], **{key: value})


def test_layer_norm_eps_is_obeyed():
    model = MoonVitPretrainedModel(MoonViTConfig.preset("tiny", layer_norm_eps=0.1))
    norms = [module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)]
    assert {norm.eps for norm in norms} == {0.1}


@pytest.mark.parametrize(
    "key, value",
    [
        *(("vision_config", {"model_type": "siglip_vision_model"}), ("text_config", {"model_type": "llama"})),
        *(("vision_config", [1]), ("model_type", "kimi_k25"), ("projector_hidden_act", "silu")),
    ],
)
def test_a_config_of_another_model_is_refused(key, value):
    with pytest.raises(ValueError, match=key):
        KimiVLConfig(**{**KimiVLConfig.preset("tiny").to_dict(), key: value})


@pytest.mark.parametrize("name", ["eager", "sdpa", "flash_attention_2"])
@pytest.mark.parametrize("model", MODELS)
def test_transformers_switch_of_attention_points_to_ours(published, model, name):
    with pytest.raises(ValueError, match=rf"{name}.*EncoderOptions\(attention="):
        model.from_pretrained(published[0], attn_implementation=name)
    with pytest.raises(ValueError, match=rf"{name}.*EncoderOptions\(attention="):
        model.from_pretrained(published[0]).set_attn_implementation(name)
