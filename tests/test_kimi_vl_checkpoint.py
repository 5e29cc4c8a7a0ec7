"""Whole checkpoints in the published layout: loaded strictly, written back byte for byte, and nothing of them run."""

import importlib
import json
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForImageTextToText

import kimivl_lab
from kimivl_lab import EncoderOptions, KimiVLConfig, KimiVLEncoder, KimiVLForConditionalGeneration, auto_classes
from kimivl_lab.config import published_config
from kimivl_lab.kimi_vl.published import published_shapes as expected_shapes
from tests.test_checkpoint import write_checkpoint
from tests.tiny_kimi_vl import published_shapes, tiny_json, write_tiny

INDEX = "model.safetensors.index.json"
EXPERT = "language_model.model.layers.1.mlp.experts.2.up_proj.weight"
LAST_EXPERT = "language_model.model.layers.2.mlp.experts.3"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def load(folder, **kwargs):
    return KimiVLForConditionalGeneration.from_pretrained(folder, **kwargs)


def stored(folder):
    """Every tensor of a folder, by name."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in list(file.keys())}
    return tensors


def same_bytes(got, want):
    raw = torch.uint8
    return got.dtype == want.dtype and got.shape == want.shape and torch.equal(got.view(raw), want.view(raw))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bfloat16")
    return folder, write_tiny(folder, seed=3, dtype="bfloat16")


def test_the_published_names_of_the_full_model_are_those_expected():
    config = KimiVLConfig(**published_config())
    with torch.device("meta"):
        expected = expected_shapes(KimiVLForConditionalGeneration(config))
    published = published_shapes(config)
    assert len(published) == 5679  # as in the published index
    assert expected == {name: shape for name, shape in published.items() if not name.endswith("inv_freq")}


@pytest.mark.parametrize("max_shard_size", ["50GB", "400KB"])
def test_a_round_trip_is_byte_equal(tiny, tmp_path, max_shard_size):
    """The router is computed in float32 and stored in bfloat16; one of its biases was published in float32."""
    folder, tensors = tiny
    bias = "language_model.model.layers.2.mlp.gate.e_score_correction_bias"
    tensors = {**tensors, bias: tensors[bias].float() + 1e-4}
    (tmp_path / "in").mkdir()
    write_checkpoint(tmp_path / "in", tensors, tiny_json("bfloat16"))
    model = load(tmp_path / "in")
    assert model.dtype == torch.bfloat16 and model.state_dict()[bias].dtype == torch.float32
    model.save_pretrained(tmp_path / "out", max_shard_size=max_shard_size)
    assert (tmp_path / "out" / INDEX).exists() == (max_shard_size != "50GB")
    want = {name: value for name, value in tensors.items() if not name.endswith("inv_freq")}
    got = stored(tmp_path / "out")
    assert got.keys() == want.keys()
    assert [name for name in want if not same_bytes(got[name], want[name])] == []
    again = load(tmp_path / "out")
    assert again.config.to_dict() | {"_name_or_path": ""} == model.config.to_dict() | {"_name_or_path": ""}


def test_a_router_that_training_changed_is_not_rounded(tiny, tmp_path):
    model = load(tiny[0])
    bias = "language_model.model.layers.{}.mlp.gate.e_score_correction_bias"
    changed = model.get_buffer(bias.format(1))
    changed += 1e-5
    model.save_pretrained(tmp_path)
    got = stored(tmp_path)
    assert got[bias.format(1)].dtype == torch.float32 and torch.equal(got[bias.format(1)], changed)
    assert same_bytes(got[bias.format(2)], tiny[1][bias.format(2)])


def test_J2_the_renamed_form_loads_and_is_saved_in_the_published_one(tiny, tmp_path):
    _, tensors = tiny
    renamed = {
        name.replace("language_model.model.", "model.language_model.").replace("language_model.lm_head", "lm_head")
        if name.startswith("language_model.")
        else f"model.{name}": value
        for name, value in tensors.items()
    }
    (tmp_path / "in").mkdir()
    write_checkpoint(tmp_path / "in", renamed, tiny_json("bfloat16"))
    load(tmp_path / "in").save_pretrained(tmp_path / "out")
    got = stored(tmp_path / "out")
    assert all(same_bytes(value, tensors[name]) for name, value in got.items()) and len(got) == len(tensors) - 3


def rename(tensors):
    tensors["vision_tower.encoder.blocks.1.attn.wo.weight"] = tensors.pop("vision_tower.encoder.blocks.1.wo.weight")
    return ["missing: vision_tower.encoder.blocks.1.wo.weight", "unused: vision_tower.encoder.blocks.1.attn.wo.weight"]


def drop(*names):
    def change(tensors):
        for name in names:
            del tensors[name]
        return [f"{len(names)} tensors missing", *names]

    return change


def drop_last_expert(tensors):
    """Of every layer: stacked, the rest would have the shape of a smaller model."""
    gone = [name for name in tensors if ".experts.3." in name]
    return drop(*gone)(tensors)[:1] + gone[:1]


def add(*names):
    def change(tensors):
        tensors |= {name: torch.ones(3) for name in names}
        return [f"{len(names)} tensors unused", *names]

    return change


def reshape(name, *shape):
    def change(tensors):
        was = tuple(tensors[name].shape)
        tensors[name] = torch.ones(*shape)
        return ["of another shape", f"{name} {shape}, not {was}"]

    return change


WRONG = {
    "renamed": rename,
    "missing vision": drop("vision_tower.patch_embed.pos_emb.weight"),
    "missing projector": drop("multi_modal_projector.linear_2.bias"),
    "missing text": drop("language_model.model.norm.weight", "language_model.lm_head.weight"),
    "missing router bias": drop("language_model.model.layers.1.mlp.gate.e_score_correction_bias"),
    "missing expert matrix": drop(EXPERT),
    "missing expert": drop(*(f"{LAST_EXPERT}.{part}_proj.weight" for part in ("gate", "up", "down"))),
    "missing last experts": drop_last_expert,
    "one expert more": add(*(f"language_model.model.layers.1.mlp.experts.4.{p}_proj.weight" for p in ("gate", "up"))),
    "extra": add("language_model.model.layers.3.mlp.extra.weight", "something"),
    "experts of a dense layer": add("language_model.model.layers.0.mlp.experts.0.up_proj.weight"),
    "misshapen": reshape("language_model.model.layers.0.self_attn.kv_b_proj.weight", 8, 8),
    "misshapen expert": reshape(EXPERT, 24, 63),
    "transposed expert": reshape(f"{LAST_EXPERT}.down_proj.weight", 24, 64),
    "misshapen vision": reshape("vision_tower.patch_embed.proj.weight", 72, 588),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("loader", [KimiVLForConditionalGeneration, AutoModelForImageTextToText])
def test_J1_wrong_tensors_are_listed(tiny, tmp_path, change, loader, monkeypatch):
    tensors = dict(tiny[1])
    named = change(tensors)
    write_checkpoint(tmp_path, tensors, tiny_json("bfloat16"))
    monkeypatch.setattr(KimiVLForConditionalGeneration, "_load_pretrained_model", None)  # it must not come so far
    with pytest.raises(ValueError) as caught:
        loader.from_pretrained(tmp_path)
    assert [text for text in named if text not in str(caught.value)] == []
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", [EXPERT, "vision_tower.encoder.blocks.0.wo.weight"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bool], ids=str)
@pytest.mark.parametrize("loader", [KimiVLForConditionalGeneration, KimiVLEncoder])
def test_J4_a_weight_that_is_stored_without_its_scale_is_refused(tiny, tmp_path, name, dtype, loader):
    """As 8-bit numbers it would load as weights of another size, without a word."""
    write_checkpoint(tmp_path, {**tiny[1], name: tiny[1][name].to(dtype)}, tiny_json("bfloat16"))
    if loader is KimiVLEncoder and name == EXPERT:
        loader.from_pretrained(tmp_path)
        return
    with pytest.raises(ValueError, match=rf"{name} \((I8|F8_E4M3|BOOL)\)"):
        loader.from_pretrained(tmp_path)


def test_experts_of_several_dtypes_keep_the_widest(tiny, tmp_path):
    exact = torch.full_like(tiny[1][EXPERT], 1 + 2**-20, dtype=torch.float32)
    write_checkpoint(tmp_path, {**tiny[1], EXPERT: exact}, tiny_json("bfloat16"))
    weight = load(tmp_path, dtype=torch.float32).get_parameter("language_model.model.layers.1.mlp.experts.gate_up_proj")
    assert torch.equal(weight[2, 24:], exact)
    assert torch.equal(weight[1, 24:], tiny[1][EXPERT.replace("experts.2", "experts.1")].float())


def test_J1_a_tensor_that_two_shards_hold_is_named_with_both(tiny, tmp_path):
    folder, tensors = tiny
    write_checkpoint(tmp_path, tensors, tiny_json("bfloat16"))
    with safe_open(tmp_path / SHARDS[0], framework="pt") as file:
        first = {name: file.get_tensor(name) for name in list(file.keys())}
    name = next(name for name in tensors if name not in first and ".experts." in name)
    save_file({**first, name: tensors[name]}, tmp_path / SHARDS[0], metadata={"format": "pt"})
    with pytest.raises(ValueError, match="stored twice") as caught:
        load(tmp_path)
    assert all(text in str(caught.value) for text in (name, *SHARDS))


def test_J1_published_and_renamed_form_of_one_tensor_are_twice_the_same(tiny, tmp_path):
    tensors = {**tiny[1], "lm_head.weight": tiny[1]["language_model.lm_head.weight"].clone()}
    write_checkpoint(tmp_path, tensors, tiny_json("bfloat16"))
    with pytest.raises(ValueError, match=r"stored twice.*language_model\.lm_head\.weight"):
        load(tmp_path)


@pytest.mark.parametrize("keep", [0.5, 0.999])
def test_a_truncated_shard_is_named(tiny, tmp_path, keep):
    write_checkpoint(tmp_path, tiny[1], tiny_json("bfloat16"))
    shard = tmp_path / SHARDS[1]
    shard.write_bytes(shard.read_bytes()[: int(keep * shard.stat().st_size)])
    with pytest.raises(ValueError, match=f"{SHARDS[1]}: damaged"):
        load(tmp_path)


def test_a_shard_that_is_not_there_is_named(tiny, tmp_path):
    write_checkpoint(tmp_path, tiny[1], tiny_json("bfloat16"))
    (tmp_path / SHARDS[0]).unlink()
    with pytest.raises(ValueError, match=f"names {SHARDS[0]}, which is not there"):
        load(tmp_path)


def test_an_index_that_names_a_tensor_that_no_shard_holds(tiny, tmp_path):
    write_checkpoint(tmp_path, tiny[1], tiny_json("bfloat16"))
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["language_model.model.layers.9.norm.weight"] = SHARDS[0]
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"layers\.9\.norm\.weight \(not in {SHARDS[0]}\)"):
        load(tmp_path)


@pytest.mark.parametrize("keys", ["published", "without inv_freq"])
def test_inv_freq_is_not_needed_and_not_taken(tiny, tmp_path, keys):
    tensors = {
        name: torch.full_like(value, 99) if name.endswith("inv_freq") else value for name, value in tiny[1].items()
    }
    if keys == "without inv_freq":
        tensors = {name: value for name, value in tensors.items() if not name.endswith("inv_freq")}
    write_checkpoint(tmp_path, tensors, tiny_json("bfloat16"))
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        assert torch.equal(load(tmp_path)(ids).logits, load(tiny[0])(ids).logits)


@pytest.mark.parametrize("trust", [{}, {"trust_remote_code": False}, {"trust_remote_code": True}], ids=str)
def test_nothing_of_the_folder_is_executed(tmp_path, trust):
    write_tiny(tmp_path)
    for name in ("configuration_kimi_vl", "modeling_kimi_vl", "processing_kimi_vl", "__init__", "conftest"):
        code = f"open({str(tmp_path / 'executed')!r}, 'w')\nclass KimiVLConfig: pass\nclass Model: pass\n"
        (tmp_path / f"{name}.py").write_text(code)
    config = tiny_json() | {"auto_map": {"AutoConfig": "configuration_kimi_vl.KimiVLConfig"}}
    config["auto_map"] |= dict.fromkeys(("AutoModel", "AutoModelForImageTextToText"), "modeling_kimi_vl.Model")
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, **trust)
    assert type(model) is KimiVLForConditionalGeneration
    assert type(AutoConfig.from_pretrained(tmp_path, **trust)) is KimiVLConfig
    assert not (tmp_path / "executed").exists()


def test_the_auto_classes_know_the_model_in_either_order_of_imports(tiny):
    """Here the package came first. There transformers' tables are complete before the package is imported."""
    assert type(AutoModelForImageTextToText.from_pretrained(tiny[0])) is KimiVLForConditionalGeneration
    program = (
        "from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, pipeline\n"
        "import kimivl_lab, sys\n"
        "print(type(AutoModelForImageTextToText.from_pretrained(sys.argv[1])) is"
        " kimivl_lab.KimiVLForConditionalGeneration)"
    )
    done = subprocess.run([sys.executable, "-c", program, tiny[0]], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"]


def test_a_class_of_transformers_for_the_same_model_type_gives_way(monkeypatch):
    tables = importlib.import_module("transformers.models.auto.configuration_auto")
    monkeypatch.setitem(tables.CONFIG_MAPPING_NAMES, "kimi_vl", "LlavaConfig")
    monkeypatch.setitem(tables.SPECIAL_MODEL_TYPE_TO_MODULE_NAME, "kimi_vl", "llava")
    assert type(AutoConfig.for_model("kimi_vl")) is not KimiVLConfig
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    auto_classes.enter_names(kimivl_lab)
    assert type(AutoConfig.for_model("kimi_vl")) is KimiVLConfig


@pytest.mark.parametrize(
    ("kwargs", "dtype"),
    [
        ({}, torch.bfloat16),
        ({"dtype": "auto", "low_cpu_mem_usage": True}, torch.bfloat16),
        ({"dtype": torch.float32, "device_map": "cpu"}, torch.float32),
        ({"dtype": "float16", "device_map": "auto"}, torch.float16),
    ],
    ids=str,
)
def test_dtype_and_device_map_are_transformers(tiny, kwargs, dtype):
    model = AutoModelForImageTextToText.from_pretrained(tiny[0], **kwargs)
    assert model.dtype == model.vision_tower.dtype == model.language_model.dtype == dtype
    weight = model.get_parameter("language_model.model.layers.1.mlp.experts.gate_up_proj")
    assert weight.dtype == dtype and not weight.is_meta
    assert torch.equal(weight[2, 24:], tiny[1][EXPERT].to(dtype))


def test_layers_on_disk_give_the_same_logits(tiny, tmp_path):
    names = ["vision_tower", "multi_modal_projector", "language_model.lm_head"]
    names += [f"language_model.model.{name}" for name in ("embed_tokens", "norm", "rotary_emb", "layers.0")]
    device_map = dict.fromkeys(names, "cpu") | {f"language_model.model.layers.{layer}": "disk" for layer in (1, 2)}
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        on_disk = load(tiny[0], device_map=device_map, offload_folder=tmp_path)(ids).logits
        assert torch.equal(on_disk, load(tiny[0])(ids).logits)


@pytest.mark.parametrize(
    ("asked", "vision", "text"),
    [
        ({}, "auto", "sdpa"),
        ({"attn_implementation": "eager"}, "eager", "eager"),
        ({"attn_implementation": "sdpa"}, "sdpa", "sdpa"),
        ({"attn_implementation": {"text_config": "eager"}}, "auto", "eager"),
        ({"attn_implementation": {"vision_config": "eager"}}, "eager", "sdpa"),
        ({"attn_implementation": "eager", "options": EncoderOptions(attention="sdpa_masked")}, "sdpa_masked", "eager"),
    ],
    ids=str,
)
@pytest.mark.parametrize("loader", [KimiVLForConditionalGeneration, AutoModelForImageTextToText])
def test_attn_implementation_reaches_both_halves(tiny, loader, asked, vision, text):
    model = loader.from_pretrained(tiny[0], **asked)
    assert model.vision_tower.options.attention == vision
    assert model.language_model.config._attn_implementation == text
    other = KimiVLForConditionalGeneration(model.config, asked.get("options"))  # the same choice from its config
    assert other.vision_tower.options.attention == vision


def test_attn_implementation_of_a_loaded_model(tiny):
    model = load(tiny[0])
    model.set_attn_implementation("eager")
    assert model.vision_tower.options.attention == model.language_model.config._attn_implementation == "eager"
    model.set_attn_implementation({"vision_config": "sdpa"})
    assert model.vision_tower.options.attention == "sdpa"
    assert model.language_model.config._attn_implementation == "eager"
    for set_or_load in (model.set_attn_implementation, lambda name: load(tiny[0], attn_implementation=name)):
        with pytest.raises(ValueError, match="no_such_kernel"):
            set_or_load("no_such_kernel")


@pytest.mark.parametrize(
    ("key", "value"),
    [("topk_method", "greedy"), ("scoring_func", "softmax"), ("moe_layer_freq", 2)],
)
def test_J8_text_mathematics_that_transformers_would_pass_over_is_refused(tmp_path, tiny, key, value):
    config = tiny_json("bfloat16")
    config["text_config"][key] = value
    write_checkpoint(tmp_path, tiny[1], config)
    with pytest.raises(ValueError, match=f"{key}={value!r}"):
        load(tmp_path)


def test_the_default_configuration_is_the_published_one():
    default, published = KimiVLConfig().to_dict(), KimiVLConfig(**published_config()).to_dict()
    for config in (default, published):
        for part in (config, config["vision_config"], config["text_config"]):
            for saved in ("dtype", "architectures", "transformers_version"):
                part.pop(saved, None)
    assert default == published
    assert published["media_placeholder_token_id"] == 163605 and published["ignore_index"] == -100


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"pad_token_id": 512}, r"pad_token_id 512.*512"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers.*1000"),
        ({"n_routed_experts": 10**9}, "n_routed_experts.*10000"),
        ({"head_dim": 64}, "head_dim=64.*8"),
    ],
    ids=str,
)
def test_a_text_config_that_no_language_model_can_have_is_refused(change, named):
    config = tiny_json()
    config["text_config"] |= change
    with pytest.raises(ValueError, match=named):
        KimiVLConfig(**config)


def test_old_names_of_the_rope_are_read(tmp_path, tiny):
    config = tiny_json("bfloat16")
    config["text_config"] |= {"rope_theta": 50000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    write_checkpoint(tmp_path, tiny[1], config)
    model = load(tmp_path)
    assert {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0}.items() <= (
        model.config.text_config.rope_parameters.items()
    )
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        assert not torch.equal(model(ids).logits, load(tiny[0])(ids).logits)


PEAK_OF_A_LOAD = """
import sys
from transformers import PreTrainedModel
from kimivl_lab import KimiVLForConditionalGeneration as Model
from kimivl_lab.measure.memory import peak_memory_mib
small, large, loader = sys.argv[1:]
if loader == "transformers":
    Model._load_pretrained_model = PreTrainedModel._load_pretrained_model
Model.from_pretrained(small)  # imports, and what torch sets up once
print(peak_memory_mib(lambda: Model.from_pretrained(large)))
"""


def peak_of_a_load(small, large, loader):
    """MiB in a process of its own: memory that this one has freed would be used again, and not be seen."""
    program = [sys.executable, "-c", PEAK_OF_A_LOAD, str(small), str(large), loader]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, check=True)
    return done.stdout.split()[-1]


def test_loading_takes_little_more_memory_than_the_weights(tiny, tmp_path, is_long):
    """As resident memory of the process, where pages of mapped files count."""
    layers = 44 if is_long else 6
    sizes = {"hidden_size": 512, "num_hidden_layers": layers, "moe_intermediate_size": 512, "n_routed_experts": 32}
    config = tiny_json("bfloat16")
    config["text_config"] |= sizes
    shapes = published_shapes(KimiVLConfig(**config)).items()
    tensors = {name: torch.full(shape, 0.01, dtype=torch.bfloat16) for name, shape in shapes}
    write_checkpoint(tmp_path, tensors, config, shards=4)
    del tensors
    size = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors")) / 2**20
    assert size > (2048 if is_long else 250)
    peak = peak_of_a_load(tiny[0], tmp_path, "ours")
    if peak == "None":
        pytest.skip("the peak of resident memory cannot be read here")
    assert 0.9 * size < float(peak) < 1.15 * size  # not less: the weights are there
    control = float(peak_of_a_load(tiny[0], tmp_path, "transformers"))
    assert control > 1.15 * size
