"""The whole model: equal to transformers' own parts put together by hand, in every way it is called."""

import json

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, DeepseekV3ForCausalLM
from transformers.models.kimi_k25 import modeling_kimi_k25 as k25

from kimivl_lab import EncoderOptions, KimiVLConfig, KimiVLForConditionalGeneration, count_host_syncs, on_device
from kimivl_lab.bench.peers import grid_thw, kimi_k25_tower
from kimivl_lab.kimi_vl.random_checkpoint import write_random_checkpoint
from tests.conftest import pixels_for, relative_error
from tests.test_checkpoint import write_checkpoint
from tests.tiny_kimi_vl import PAD, PLACEHOLDER, VOCABULARY, tiny_json, write_tiny

GREEDY = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
GRIDS = [(4, 6), (2, 12), (8, 2), (6, 6)]  # 6, 6, 4 and 9 tokens: no square among the first three


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """(folder, tensors) of a small whole model in the published layout, two shards."""
    folder = tmp_path_factory.mktemp("kimi_vl")
    return folder, write_tiny(folder, seed=1)


@pytest.fixture(scope="module")
def model(checkpoint):
    return KimiVLForConditionalGeneration.from_pretrained(checkpoint[0])


@pytest.fixture(scope="module")
def language(checkpoint, tmp_path_factory):
    """transformers' own language model, loaded by transformers from the same tensors."""
    folder = tmp_path_factory.mktemp("deepseek")
    prefix = "language_model."
    parts = {name.removeprefix(prefix): value for name, value in checkpoint[1].items() if name.startswith(prefix)}
    write_checkpoint(folder, parts, tiny_json()["text_config"])
    return DeepseekV3ForCausalLM.from_pretrained(folder)


@pytest.fixture(scope="module")
def peer_features(model):
    """The K2.5 tower and projector of transformers with this model's weights: (pixels, grids) -> (T, hidden)."""
    tower, ours = kimi_k25_tower(model.vision_tower), model.multi_modal_projector.state_dict()
    config = k25.Kimi_K25Config(
        vision_config=tower.config,
        text_config=model.config.text_config.to_dict(),
        projection_hidden_size=model.config.vision_config.hidden_size,
    )
    projector = k25.Kimi_K25MultimodalProjection(config)
    names = {"pre_norm": "pre_norm", "linear_1": "in_proj", "linear_2": "out_proj"}
    projector.load_state_dict({f"{names[k.split('.')[0]]}.{k.split('.')[1]}": v for k, v in ours.items()})

    def features(pixels, grids):
        with torch.no_grad():
            return projector(tower(pixels, grid_thw=grid_thw(grids)).pooler_output).squeeze(1)

    return features


def prompts(images_of_prompt, grids=GRIDS, seed=0):
    """Left-padded ids and mask of one prompt for each entry, which is its number of images; then pixels and grids."""
    generator = torch.Generator().manual_seed(seed)
    rows, used = [], iter(grids)
    for images in images_of_prompt:
        row = torch.randint(0, PLACEHOLDER, (2,), generator=generator).tolist()
        for h, w in (next(used) for _ in range(images)):
            row += [PLACEHOLDER] * (h * w // 4) + torch.randint(0, PLACEHOLDER, (3,), generator=generator).tolist()
        rows.append(row)
    longest = max(map(len, rows))
    ids = torch.tensor([[PAD] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    grids = list(grids[: sum(images_of_prompt)])
    inputs = {"input_ids": ids, "attention_mask": mask}
    return inputs | ({"pixel_values": pixels_for(grids, seed), "image_grid_hws": torch.tensor(grids)} if grids else {})


def composed_inputs(inputs, language, peer_features):
    """The same prompts as embeddings, put together in a loop."""
    embeds = language.get_input_embeddings()(inputs["input_ids"]).detach().clone()
    if "pixel_values" in inputs:
        features = iter(peer_features(inputs["pixel_values"], inputs["image_grid_hws"].tolist()))
        for row, column in (inputs["input_ids"] == PLACEHOLDER).nonzero().tolist():
            embeds[row, column] = next(features)
    return {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}


@pytest.mark.parametrize("images", [(1,), (0, 1, 3), (2, 2), (0,)], ids=str)
def test_logits_and_greedy_ids_equal_the_composition(images, model, language, peer_features):
    inputs = prompts(images)
    composed = composed_inputs(inputs, language, peer_features)
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        ours, theirs = model(**inputs).logits[real], language(**composed).logits[real]
        assert theirs.std() > 0.5  # logits that differ from each other, so that the tolerance means something
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
        new = model.generate(**inputs, **GREEDY)[:, inputs["input_ids"].shape[1] :]
        assert torch.equal(new, language.generate(**composed, **GREEDY))
        assert torch.equal(new, model.generate(**composed, **GREEDY))  # embeddings that somebody else put together


def calls_of(module):
    """A list that grows with each forward of `module`; it holds the number of rows that came in."""
    seen = []
    module.register_forward_pre_hook(lambda m, args, kwargs: seen.append(1), with_kwargs=True)
    return seen


def test_a_prompt_gives_the_same_alone_and_among_others(model):
    """Padding and the images of other prompts change nothing."""
    inputs = prompts((1, 0, 2))
    together = model.generate(**inputs, **GREEDY)[:, inputs["input_ids"].shape[1] :]
    starts, patches = [0, 1, 1, 3], [h * w for h, w in GRIDS]
    for row, mask in enumerate(inputs["attention_mask"].bool()):
        images = slice(starts[row], starts[row + 1])
        alone = {"input_ids": inputs["input_ids"][row][mask][None]}
        if images.stop > images.start:
            pixels = slice(sum(patches[: images.start]), sum(patches[: images.stop]))
            alone |= {"pixel_values": inputs["pixel_values"][pixels], "image_grid_hws": GRIDS[images]}
        assert torch.equal(model.generate(**alone, **GREEDY)[0, mask.sum() :], together[row])


def test_right_padding_gives_the_logits_of_left_padding(model):
    left = prompts((0, 1, 2))
    real = left["attention_mask"].bool()
    right = left | {"input_ids": torch.full_like(left["input_ids"], PAD), "attention_mask": real.flip(1).long()}
    right["input_ids"][real.flip(1)] = left["input_ids"][real]
    with torch.no_grad():
        got, want = model(**right).logits[real.flip(1)], model(**left).logits[real]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("settings", [{}, {"use_cache": False}, {"num_beams": 3}], ids=str)
def test_images_are_encoded_once_however_many_tokens_follow(model, settings):
    tower, language = calls_of(model.vision_tower), calls_of(model.language_model)
    model.generate(**prompts((0, 1, 3)), **GREEDY | settings)
    assert len(tower) == 1 and len(language) == GREEDY["max_new_tokens"]


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5},
        {"do_sample": True, "num_return_sequences": 3, "top_k": 20},
        {"use_cache": False},
        {"cache_implementation": "static"},
    ],
    ids=str,
)
def test_ways_of_generating_equal_those_of_the_language_model(settings, model, language, peer_features):
    """Each prompt is repeated with its images: 0, 1 and 3 of them, so that repeated patches would be others'."""
    inputs = prompts((0, 1, 3))
    torch.manual_seed(0)
    ours = model.generate(**inputs, **GREEDY | settings)[:, inputs["input_ids"].shape[1] :]
    torch.manual_seed(0)
    assert torch.equal(ours, language.generate(**composed_inputs(inputs, language, peer_features), **GREEDY | settings))


def test_prompt_lookup_decoding_equals_greedy_decoding(model):
    inputs = prompts((2,))
    assert torch.equal(
        model.generate(**inputs, **GREEDY, prompt_lookup_num_tokens=2), model.generate(**inputs, **GREEDY)
    )


def test_a_cache_of_an_earlier_call_is_continued(model):
    """A conversation: the second question comes with the whole text and with new images only."""
    inputs = prompts((1,))
    first = model.generate(**inputs, **GREEDY, return_dict_in_generate=True)
    more = prompts((1,), grids=[(2, 4)], seed=5)
    ids = torch.cat([first.sequences, more["input_ids"]], dim=1)
    cache = first.get("cache", first.get("past_key_values"))
    name = "cache" if "cache" in first else "past_key_values"
    images = {key: more[key] for key in ("pixel_values", "image_grid_hws")}
    continued = model.generate(input_ids=ids, **images, **GREEDY, **{name: cache})
    both = {
        "pixel_values": torch.cat([inputs["pixel_values"], more["pixel_values"]]),
        "image_grid_hws": torch.cat([inputs["image_grid_hws"], more["image_grid_hws"]]),
    }
    assert torch.equal(continued, model.generate(input_ids=ids, **both, **GREEDY))


def test_precomputed_image_embeddings(model):
    inputs = prompts((0, 1, 2))
    with torch.no_grad():
        want = model(**inputs).logits
        image_embeds = model.get_image_features(inputs.pop("pixel_values"), inputs.pop("image_grid_hws"))
        tower = calls_of(model.vision_tower)
        assert torch.equal(model(**inputs, image_embeds=image_embeds).logits, want)
        beams = model.generate(**inputs, image_embeds=image_embeds, **GREEDY, num_beams=2)
    assert not tower
    assert torch.equal(beams, model.generate(**prompts((0, 1, 2)), **GREEDY, num_beams=2))


def wrong_counts(inputs):
    """The same inputs with one placeholder less."""
    ids = inputs["input_ids"].clone()
    row, column = (ids == PLACEHOLDER).nonzero()[0].tolist()
    ids[row, column] = 7
    return inputs | {"input_ids": ids}


@pytest.mark.parametrize("call", ["forward", "generate", "beams", "embeds"])
def test_F6_nine_placeholders_for_ten_features(model, call):
    """Before the tower and the language model run."""
    inputs = wrong_counts(prompts((2,), grids=[(2, 8), (4, 6)]))
    tower, language = calls_of(model.vision_tower), calls_of(model.language_model)
    if call == "embeds":
        del inputs["pixel_values"], inputs["image_grid_hws"]
        inputs["image_embeds"] = torch.zeros(10, 64)
    settings = {"beams": {"num_beams": 2}}.get(call, {})
    with pytest.raises(ValueError, match=r"\b9 image placeholders for 10 image features"):
        model.generate(**inputs, **GREEDY | settings) if call in ("generate", "beams") else model(**inputs)
    assert not tower and not language


@pytest.mark.parametrize("call", ["forward", "generate"])
def test_F6_equal_sums_whose_images_run_over_into_the_next_prompt(model, call):
    """Each of two prompts has one image of 4 and 6 tokens, and 5 placeholders."""
    ids = torch.tensor([[1, *[PLACEHOLDER] * 5, 2], [3, *[PLACEHOLDER] * 5, 4]])
    images = {"pixel_values": pixels_for([(2, 8), (4, 6)]), "image_grid_hws": [(2, 8), (4, 6)]}
    language = calls_of(model.language_model)
    with pytest.raises(ValueError, match=r"the 5 image placeholders of prompt 0 .*\[4, 6\]"):
        model(ids, **images) if call == "forward" else model.generate(ids, **images, **GREEDY)
    assert not language


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda inputs: {"input_ids": inputs["input_ids"]}, r"6 image placeholders for 0"),
        (lambda inputs: inputs | {"input_ids": torch.ones(1, 4, dtype=torch.long)}, r"0 image placeholders for 6"),
        (lambda inputs: inputs | {"image_grid_hws": None}, "image_grid_hws"),
        (lambda inputs: inputs | {"pixel_values": None}, "pixel_values"),
        (lambda inputs: inputs | {"image_embeds": torch.zeros(6, 64)}, "not both"),
        (lambda inputs: inputs | {"pixel_values": inputs["pixel_values"][:-1]}, "23 patches.*24"),
        (lambda inputs: inputs | {"inputs_embeds": torch.zeros(1, 4, 64)}, "inputs_embeds"),
        (lambda inputs: {"inputs_embeds": torch.zeros(1, 4, 64), "pixel_values": inputs["pixel_values"]}, "images"),
        (lambda inputs: {"input_ids": inputs["input_ids"][0]}, r"\(B, S\)"),
        (lambda inputs: {"input_ids": inputs["input_ids"], "image_embeds": torch.zeros(6, 65)}, r"\(T, 64\).*65"),
        (lambda inputs: {}, "input_ids.*or inputs_embeds"),
    ],
)
def test_inputs_that_do_not_fit_together_are_refused(model, change, named):
    language = calls_of(model.language_model)
    inputs = prompts((1,))
    del inputs["attention_mask"]
    with pytest.raises(ValueError, match=named):
        model(**change(inputs))
    assert not language


def test_a_placeholder_that_the_model_wrote_is_no_image(model):
    """Behind a cache the check does not apply: any id may be sampled."""
    inputs = prompts((1,))
    with torch.no_grad():
        out = model(**inputs, use_cache=True)
        name = "cache" if "cache" in out else "past_key_values"
        step = model(torch.tensor([[PLACEHOLDER]]), **{name: out[name]}).logits
    assert step.isfinite().all()


@pytest.mark.parametrize("keep", [1, 3, torch.tensor([2, 5])], ids=str)
@pytest.mark.parametrize("name", ["logits_to_keep", "num_logits_to_keep"])
def test_logits_to_keep(model, keep, name):
    inputs = prompts((1, 1))
    with torch.no_grad():
        logits = model(**inputs).logits
        got = model(**inputs, **{name: keep}).logits
    want = logits[:, -keep:] if isinstance(keep, int) else logits[:, keep]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def fresh(checkpoint, **kwargs):
    return KimiVLForConditionalGeneration.from_pretrained(checkpoint[0], **kwargs)


def training_inputs(images=(0, 1, 2)):
    inputs = prompts(images)
    labels = inputs["input_ids"].clone()
    labels[(inputs["attention_mask"] == 0) | (labels == PLACEHOLDER)] = -100
    return inputs | {"labels": labels}


def test_the_loss_and_its_gradients(checkpoint, language, peer_features):
    """The loss is the language model's own, and a step along the gradient of tower and projector lowers it."""
    model, inputs = fresh(checkpoint), training_inputs()
    loss = model(**inputs).loss
    composed = composed_inputs(inputs, language, peer_features)
    torch.testing.assert_close(loss, language(**composed, labels=inputs["labels"]).loss, rtol=1e-5, atol=0)
    assert torch.equal(model(**inputs, return_dict=False)[0], loss)
    loss.backward()
    vision = [p for part in (model.vision_tower, model.multi_modal_projector) for p in part.parameters()]
    assert all(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in vision)
    slope = sum(parameter.grad.square().sum() for parameter in vision)
    step = 0.01 * float(loss.detach()) / float(slope)  # by the gradient this lowers the loss by 1 %
    with torch.no_grad():
        for parameter in vision:
            parameter -= step * parameter.grad
        lowered = 1 - float(model(**inputs).loss / loss)
    assert 0.005 < lowered < 0.015


def test_ignored_labels_are_the_configurations(checkpoint):
    model, inputs = fresh(checkpoint), training_inputs((1,))
    want = model(**inputs).loss
    model.config.ignore_index = -7
    inputs["labels"][inputs["labels"] == -100] = -7
    assert torch.equal(model(**inputs).loss, want)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(checkpoint, use_reentrant):
    plain, again, inputs = fresh(checkpoint).train(), fresh(checkpoint).train(), training_inputs()
    enable = getattr(again, "activation_checkpointing_enable", again.gradient_checkpointing_enable)
    enable({"use_reentrant": use_reentrant})
    blocks = calls_of(again.vision_tower.encoder.blocks[0])
    if use_reentrant:  # its blocks have a gradient only if their input has one
        inputs["pixel_values"].requires_grad_()
    for model in (plain, again):
        model(**inputs).loss.backward()
    assert len(blocks) == 2  # forward, and once more in the backward pass
    for (name, one), (_, other) in zip(plain.named_parameters(), again.named_parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:  # an expert that no token chose has none
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-8, msg=name)


def test_lora_on_both_halves(checkpoint):
    """Adapters change the logits when they are trained, are merged to the same logits, and leave the base as it was."""
    from peft import LoraConfig, get_peft_model

    inputs = training_inputs((1,))
    base = fresh(checkpoint)
    want = base(**inputs).logits.detach()
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["wqkv", "fc0", "linear_1", "q_proj", "o_proj"]))
    torch.testing.assert_close(adapted(**inputs).logits, want, rtol=0, atol=1e-5)
    optimiser = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=1.0)
    adapted(**inputs).loss.backward()
    trained = {name for name, p in adapted.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert {part for part in ("wqkv", "fc0", "linear_1", "q_proj") if any(part in name for name in trained)} == (
        {"wqkv", "fc0", "linear_1", "q_proj"}
    )
    assert all("lora" in name for name in trained)
    optimiser.step()
    with torch.no_grad():
        got = adapted(**inputs).logits
        assert relative_error(got, want) > 1e-3
        torch.testing.assert_close(adapted.merge_and_unload()(**inputs).logits, got, rtol=0, atol=1e-4)


@pytest.mark.parametrize("size", [VOCABULARY + 8, PAD + 1, PLACEHOLDER - 1])
def test_another_size_of_the_vocabulary(checkpoint, tmp_path, size):
    model, inputs = fresh(checkpoint), prompts((1,))
    model.config.text_config.pad_token_id = None  # it may not lie past the vocabulary; the placeholder may
    assert inputs["input_ids"].max() <= PLACEHOLDER
    text = inputs["input_ids"] != PLACEHOLDER
    inputs["input_ids"][text] = inputs["input_ids"][text].clamp(max=PLACEHOLDER - 2)
    with torch.no_grad():
        want = model(**inputs).logits
        model.resize_token_embeddings(size)
        got = model(**inputs).logits
    assert model.config.vocab_size == model.config.text_config.vocab_size == got.shape[-1] == size
    kept = min(size, VOCABULARY)
    torch.testing.assert_close(got[..., :kept], want[..., :kept], rtol=0, atol=1e-5)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(KimiVLForConditionalGeneration.from_pretrained(tmp_path)(**inputs).logits, got)


def test_embedding_and_head_are_not_tied(model):
    assert model.get_input_embeddings().weight is not model.get_output_embeddings().weight
    assert model.config.tie_word_embeddings is False


def test_encoder_options_and_graphs_in_one_place(checkpoint):
    """The encoder's switches are the model's: they change no id that is generated."""
    model = fresh(checkpoint, options=EncoderOptions(attention="eager", position="interpolate", position_cache_bytes=0))
    inputs = prompts((0, 1, 3))
    want = model.generate(**inputs, **GREEDY)
    model.set_options(attention="sdpa", position="cached", linear="plain")
    assert torch.equal(model.generate(**inputs, **GREEDY), want)
    model.set_graphs([16, 32], max_images=4)
    assert torch.equal(model.generate(**inputs, **GREEDY), want)
    assert model.graph_runner is not None and model.graph_runner.stats.hits == 1


@pytest.mark.parametrize(("limit", "tokens"), [(4096, 1089), (16384, 1296)])
def test_processor_and_model_of_one_folder_agree(tmp_path, limit, tokens):
    """For both published limits; images that another limit resized are refused with both numbers."""
    write_random_checkpoint(tmp_path, vocab_size=1024)
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**settings, "in_token_limit": limit}))
    processor, model = AutoProcessor.from_pretrained(tmp_path), AutoModelForImageTextToText.from_pretrained(tmp_path)
    image = Image.new("RGB", (1000, 1000), "teal")
    inputs = processor(images=[image], text=["before <|media_pad|> after"], return_tensors="pt")
    assert int((inputs["input_ids"] == processor.image_token_id).sum()) == tokens
    assert processor.image_token_id == model.config.media_placeholder_token_id
    assert model.generate(**inputs, max_new_tokens=1).shape == (1, inputs["input_ids"].shape[1] + 1)
    other = processor(images=[Image.new("RGB", (28, 28))], text=["<|media_pad|>"], return_tensors="pt")
    images = {name: other[name] for name in ("pixel_values", "image_grid_hws")}
    with pytest.raises(ValueError, match=rf"{tokens} image placeholders for 1 "):
        model.generate(**(inputs | images), max_new_tokens=1)


def test_H1_a_prompt_is_counted_by_one_read_and_a_step_reads_nothing_back():
    """With dense layers: transformers' experts take other operators on a GPU than a pretended device has."""
    config = tiny_json()
    config["text_config"]["first_k_dense_replace"] = 3
    options = EncoderOptions(rope="real", linear="plain")
    model = on_device(KimiVLForConditionalGeneration(KimiVLConfig(**config), options).eval())
    inputs = prompts((2,))
    ids, pixels, grids = on_device(inputs["input_ids"]), inputs["pixel_values"], inputs["image_grid_hws"]
    with torch.no_grad():
        prompt = count_host_syncs(lambda: model(ids, pixels, grids, use_cache=True))
        assert prompt.by_kind == {"tolist": 1}, prompt
        name = "cache" if "cache" in prompt.value else "past_key_values"
        step = count_host_syncs(lambda: model(on_device(torch.tensor([[5]])), **{name: prompt.value[name]}))
    assert step.total == 0, step
