"""The processor: placeholders and images, batches, the chat template, the Auto classes, refusals with both numbers."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, pipeline

from kimivl_lab import KimiVLImageProcessor, KimiVLProcessor, image_geometry
from kimivl_lab.kimi_vl.random_checkpoint import write_random_checkpoint

PAD = "<|media_pad|>"
SIZES = [(100, 60), (30, 200), (28, 28)]  # width x height: 12, 16 and 1 tokens


def picture(width, height, seed=0):
    levels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(levels)


def tokens_of(width, height, **settings):
    return image_geometry(width, height, **settings).tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("checkpoint"), vocab_size=1024, dtype=torch.float32)


@pytest.fixture(scope="module")
def processor(folder):
    return AutoProcessor.from_pretrained(folder)


@pytest.fixture
def images():
    return [picture(*size, seed) for seed, size in enumerate(SIZES)]


def pads(processor, row):
    return int((row == processor.image_token_id).sum())


def test_each_placeholder_becomes_the_tokens_of_its_image(processor, images):
    text = f"one {PAD} two {PAD}, three {PAD}."
    batch = processor(images=images, text=text, return_tensors="pt")
    runs = [f"{PAD * tokens_of(*size)}" for size in SIZES]
    expected = processor.tokenizer(f"one {runs[0]} two {runs[1]}, three {runs[2]}.")["input_ids"]
    assert batch["input_ids"].tolist() == [expected]
    plain = KimiVLImageProcessor()(images)
    assert torch.equal(batch["pixel_values"], plain["pixel_values"])
    assert torch.equal(batch["image_grid_hws"], plain["image_grid_hws"])


@pytest.mark.parametrize("nested", [False, True])
def test_a_batch_of_prompts_with_0_1_and_3_images(processor, images, nested):
    prompts = ["none", f"a {PAD}", f"{PAD} and {PAD}{PAD}"]
    given = [[], [images[0]], [images[1], images[2], images[0]]]
    batch = processor(images=given if nested else sum(given, []), text=prompts, padding=True, return_tensors="pt")
    counts = [sum(tokens_of(*image.size) for image in own) for own in given]
    assert [pads(processor, row) for row in batch["input_ids"]] == counts
    assert batch["attention_mask"][0].tolist() == sorted(batch["attention_mask"][0].tolist())  # padded on the left
    assert len(batch["image_grid_hws"]) == 4


def test_F9_an_expanded_prompt_is_not_expanded_again(processor, images):
    text = f"one {PAD} two {PAD}, three {PAD}."
    once = processor(images=images, text=text, return_tensors="pt")
    again = processor(images=images, text=processor.decode(once["input_ids"][0]), return_tensors="pt")
    assert torch.equal(once["input_ids"], again["input_ids"])
    mixed = processor(images=[images[0], images[0]], text=[f"{PAD * 12} x", f"{PAD} y"])
    assert [ids.count(processor.image_token_id) for ids in mixed["input_ids"]] == [12, 12]


def test_a_run_of_another_length_is_refused_with_both_numbers(processor, images):
    with pytest.raises(ValueError, match="11 .* 12"):
        processor(images=[images[0]], text=f"{PAD * 11} x")


@pytest.mark.parametrize(
    ("prompts", "given", "numbers"),
    [
        (f"{PAD} {PAD}", 1, "2 .* 1 "),
        (PAD, 3, "1 .* 3 "),
        ("none", 1, "0 .* 1 "),
        ([PAD, f"{PAD} {PAD}"], 2, "3 .* 2 "),
        (f"{PAD} {PAD}", 0, "2 .* 0 "),
    ],
)
def test_placeholders_and_images_differ(processor, images, prompts, given, numbers):
    with pytest.raises(ValueError, match=numbers):
        processor(images=images[:given] if given else None, text=prompts)


def test_an_image_of_another_prompt_is_not_taken(processor, images):
    """As many images as placeholders in all, but not in each prompt."""
    with pytest.raises(ValueError, match="prompt 0 .* 1 .* 2 "):
        processor(images=[[images[0], images[1]], []], text=[f"{PAD}", f"{PAD}"])


def test_a_truncation_that_cuts_placeholders_is_refused(processor, images):
    with pytest.raises(ValueError, match="7 of 12"):
        processor(images=[images[0]], text=PAD, truncation=True, max_length=7, return_tensors="pt")
    short = processor(text="a long prompt without images", truncation=True, max_length=7)
    assert len(short["input_ids"][0]) == 7


def test_options_reach_the_part_that_they_are_for(processor, images):
    settings = {"in_token_limit": 8}
    text = dict(text=PAD, images=[images[0]], return_tensors="pt")
    for options in (settings, {"images_kwargs": settings}, {"common_kwargs": settings}):
        batch = processor(**text, **options)
        assert pads(processor, batch["input_ids"]) == tokens_of(*SIZES[0], **settings) != 12
    padded = processor(text="a", text_kwargs={"padding": "max_length", "max_length": 9}, return_tensors="np")
    assert padded["input_ids"].shape == (1, 9)
    for unknown in ({"in_token_limits": 8}, {"text_kwargs": {"paddings": True}}, {"images_kwargs": {"size": 3}}):
        with pytest.raises(TypeError, match="in_token_limits|paddings|size"):
            processor(**text, **unknown)


@pytest.mark.parametrize(
    "arguments", [{}, {"text": [1]}, {"text": "a", "videos": [0]}, {"text": "a", "return_tensors": "x"}]
)
def test_other_input_is_refused(processor, arguments):
    with pytest.raises(ValueError, match="give text|must be|no videos"):
        processor(**arguments)


def test_images_alone_and_text_alone(processor, images):
    assert processor(images=images)["image_grid_hws"].shape == (3, 2)
    assert set(processor(text="a")) == {"input_ids", "attention_mask"}


def test_the_chat_template_places_the_images(processor, images, tmp_path):
    path = tmp_path / "an image.png"
    images[1].save(path)
    content = [
        {"type": "image", "image": images[0]},
        {"type": "image", "path": str(path)},
        {"type": "text", "text": "?"},
    ]
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "add_generation_prompt": True}
    batch = processor.apply_chat_template([{"role": "user", "content": content}], **options)
    assert pads(processor, batch["input_ids"]) == tokens_of(*SIZES[0]) + tokens_of(*SIZES[1])
    image = "<|media_start|>image<|media_content|>{}<|media_end|>"
    assert processor.decode(batch["input_ids"][0]) == (
        "<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|><|im_user|>user<|im_middle|>"
        f"{image.format(PAD * 12)}{image.format(PAD * 16)}?<|im_end|><|im_assistant|>assistant<|im_middle|>"
    )


def test_in_token_limit_is_the_checkpoints(folder, tmp_path):
    """Kimi-VL-A3B-Thinking-2506 has 16384 in its file: 1792 x 1792 pixels are 4,096 tokens, not 1,024."""
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**settings, "in_token_limit": 16384}))
    large = picture(1792, 1792)
    ids = AutoProcessor.from_pretrained(tmp_path)(images=large, text=PAD)["input_ids"][0]
    assert len(ids) == 4096
    assert len(AutoProcessor.from_pretrained(folder)(images=large, text=PAD)["input_ids"][0]) == 1024


def test_save_and_load(processor, images, tmp_path):
    processor.save_pretrained(tmp_path)
    again = KimiVLProcessor.from_pretrained(tmp_path)
    text = [{"role": "user", "content": [{"type": "image", "image": images[0]}, {"type": "text", "text": "?"}]}]
    options = {"tokenize": True, "return_dict": True}
    assert (
        again.apply_chat_template(text, **options)["input_ids"]
        == processor.apply_chat_template(text, **options)["input_ids"]
    )
    assert again.image_processor.to_dict() == processor.image_processor.to_dict()


@pytest.mark.parametrize("trust", [None, True])
def test_nothing_of_the_folder_is_executed(folder, tmp_path, monkeypatch, trust):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    code = "open('executed', 'w'); raise SystemExit('this must not run')"
    for name, field in {
        "preprocessor_config.json": {
            "AutoProcessor": "code.KimiVLProcessor",
            "AutoImageProcessor": "code.KimiVLImageProcessor",
        },
        "tokenizer_config.json": {"AutoTokenizer": ["code.TikTokenTokenizer", None]},
        "config.json": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"},
    }.items():
        settings = json.loads((tmp_path / name).read_text())
        (tmp_path / name).write_text(json.dumps({**settings, "auto_map": field}))
    (tmp_path / "code.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    kwargs = {} if trust is None else {"trust_remote_code": trust}
    assert type(AutoProcessor.from_pretrained(tmp_path, **kwargs)) is KimiVLProcessor
    assert not (tmp_path / "executed").exists()


def test_a_tokenizer_without_the_placeholder_is_refused(folder, processor, tmp_path):
    from kimivl_lab import TikTokenTokenizer

    (tmp_path / "tiktoken.model").write_bytes((folder / "tiktoken.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("{}")
    tokenizer = TikTokenTokenizer.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{len(tokenizer.encode(PAD))} tokens"):
        KimiVLProcessor(processor.image_processor, tokenizer)


def test_counts_for_engines_that_ask_before_they_process(processor):
    asked = processor._get_num_multimodal_tokens(image_sizes=[(height, width) for width, height in SIZES])
    assert asked.num_image_tokens == [12, 16, 1] and asked.num_image_patches == [48, 64, 4]
    assert processor._get_num_multimodal_tokens(image_sizes=[(60, 100)], in_token_limit=8).num_image_tokens != [12]


def test_the_pipeline_answers(folder, images):
    answer: Any = pipeline("image-text-to-text", model=str(folder))
    content = [{"type": "image", "image": images[0]}, {"type": "text", "text": "What is it?"}]
    found = answer(text=[{"role": "user", "content": content}], max_new_tokens=4, return_full_text=False)
    assert isinstance(found[0]["generated_text"], str)
    assert answer.model.generate is not None and type(answer.processor) is KimiVLProcessor
