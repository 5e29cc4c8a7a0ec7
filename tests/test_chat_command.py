"""`make-checkpoint` and `chat`: a small checkpoint is written, answers while it generates, and faults are one line."""

import io
import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from transformers import AutoModelForImageTextToText, AutoProcessor

from kimivl_lab.commands import main as cli
from kimivl_lab.kimi_vl.random_checkpoint import write_random_checkpoint

FEW = ["--max-new-tokens", "6"]


def run(*arguments):
    return cli.main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "checkpoint"
    assert run("make-checkpoint", folder, "--vocab-size", 1024, "--dtype", "float32") == 0
    return folder


@pytest.fixture
def image(tmp_path):
    path = tmp_path / "an image.png"
    Image.effect_noise((100, 60), 80).convert("RGB").save(path)
    return path


def expected_answer(folder, image, question, tokens, **generation):
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    content = [*([{"type": "image", "path": str(image)}] if image else []), {"type": "text", "text": question}]
    batch = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        **{"tokenize": True, "return_dict": True, "return_tensors": "pt", "add_generation_prompt": True},
    )
    ids = model.generate(**batch, max_new_tokens=tokens, do_sample=False, **generation)
    return processor.decode(ids[0, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def test_the_folder_has_the_published_layout(folder):
    names = {path.name for path in folder.iterdir()}
    shards = {f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    assert names == shards | {
        *("config.json", "generation_config.json", "model.safetensors.index.json", "preprocessor_config.json"),
        *("tiktoken.model", "tokenizer_config.json", "chat_template.jinja"),
    }
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index.values()) == shards
    experts = [name for name in index if ".mlp.experts." in name]
    assert len(experts) == 2 * 4 * 3 and "language_model.model.layers.1.mlp.experts.3.down_proj.weight" in experts
    for shard in shards:
        with safe_open(folder / shard, framework="pt") as file:
            assert {name for name, home in index.items() if home == shard} == set(file.keys())
    assert "auto_map" not in (folder / "config.json").read_text()


def test_the_seed_decides_the_weights_and_sizes_are_options(tmp_path):
    def weights(name, **options: Any):
        written = write_random_checkpoint(tmp_path / name, vocab_size=512, shards=1, **options)
        with safe_open(written / "model.safetensors", framework="pt") as file:
            return {key: file.get_tensor(key) for key in list(file.keys())}

    first, same, other = weights("a"), weights("b"), weights("c", seed=1)
    assert all(torch.equal(value, same[name]) for name, value in first.items())
    assert not torch.equal(first["language_model.lm_head.weight"], other["language_model.lm_head.weight"])
    assert first["language_model.lm_head.weight"].dtype == torch.bfloat16
    more = weights("d", text={"num_hidden_layers": 1, "n_routed_experts": 6}, vision={"num_hidden_layers": 1})
    assert not any(".layers.1." in name or ".blocks.1." in name for name in more)


@pytest.mark.parametrize(
    ("wrong", "numbers"),
    [
        ({"vocab_size": 511}, "512.*511"),
        ({"shards": 0}, "1.*0"),
        ({"text": {"n_routed_experts": 1}}, "2.*1"),
        ({"vision": {"hidden_size": 145}}, "145"),
    ],
)
def test_sizes_that_cannot_be_are_refused(tmp_path, wrong: Any, numbers):
    with pytest.raises(ValueError, match=numbers):
        write_random_checkpoint(tmp_path / "x", **({"vocab_size": 1024} | wrong))
    assert not (tmp_path / "x").exists()


def test_a_folder_with_files_is_not_overwritten(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert run("make-checkpoint", tmp_path, "--vocab-size", 512) == 2
    assert "--force" in capsys.readouterr().err and len(list(tmp_path.iterdir())) == 1
    assert run("make-checkpoint", tmp_path, "--vocab-size", 512, "--force") == 0
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("with_image", [False, True])
def test_the_answer_is_generates(folder, image, capsys, with_image):
    words = [image] if with_image else []
    assert run("chat", "--checkpoint", folder, *words, "What is it?", *FEW) == 0
    told = capsys.readouterr()
    assert told.out.strip() == expected_answer(folder, image if with_image else None, "What is it?", 6).strip()
    assert (
        "random" in told.err and "6 new tokens" in told.err and f"{12 if with_image else 0} of them images" in told.err
    )


def test_a_seed_gives_the_same_sample_twice(folder, capsys):
    def answer(seed):
        assert run("chat", "--checkpoint", folder, "Hello", *FEW, "--temperature", 1, "--seed", seed) == 0
        return capsys.readouterr().out

    assert answer(3) == answer(3) != answer(4)


def test_several_questions_on_a_terminal_encode_the_images_once(folder, image, capsys, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    from kimivl_lab import KimiVLForConditionalGeneration

    calls = []
    encode = KimiVLForConditionalGeneration.get_image_features

    def counted(self, *arguments, **kwargs):
        calls.append(arguments)
        return encode(self, *arguments, **kwargs)

    monkeypatch.setattr(KimiVLForConditionalGeneration, "get_image_features", counted)
    monkeypatch.setattr(sys, "stdin", Terminal("What is it?\nAnd again?\n"))
    assert run("chat", "--checkpoint", folder, image, *FEW) == 0
    told = capsys.readouterr()
    assert len(calls) == 1
    first = expected_answer(folder, image, "What is it?", 6)
    assert first.strip() in told.out and told.err.count("6 new tokens") == 2


def test_faults_are_one_line(folder, image, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    broken = tmp_path / "broken.png"
    broken.write_bytes(image.read_bytes()[:60])
    missing_weight = tmp_path / "damaged"
    missing_weight.mkdir()
    for path in folder.iterdir():
        if path.name != "model-00002-of-00002.safetensors":
            (missing_weight / path.name).write_bytes(path.read_bytes())
    for words, named in [
        (["--checkpoint", tmp_path / "nowhere", "Hi"], "nowhere"),
        (["--checkpoint", missing_weight, "Hi"], "model-00002-of-00002.safetensors"),
        (["--checkpoint", folder], "no question"),
        (["--checkpoint", folder, image], "no question"),
        (["--checkpoint", folder, tmp_path / "none.png", "Hi"], "none.png"),
        (["--checkpoint", folder, broken, "Hi"], "broken.png"),
        (["--checkpoint", folder, "Hi", "--max-new-tokens", 8192], "8192"),
        (["--checkpoint", folder, "Hi", "--attention", "none"], "none"),
    ]:
        assert run("chat", *words) == 2
        told = capsys.readouterr()
        errors = [line for line in told.err.splitlines() if "error:" in line]
        assert len(errors) == 1 and named in errors[0] and "Traceback" not in told.err and not told.out.strip()


def test_a_closed_pipe_ends_quietly(folder):
    command = f'"{sys.executable}" -m kimivl_lab.cli chat --checkpoint "{folder}" Hi --max-new-tokens 40 | head -c 3'
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert len(done.stdout) == 3 and "Traceback" not in done.stderr
