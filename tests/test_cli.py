"""The command line, with the tiny preset: what it writes, says and refuses."""

import json
import subprocess
import sys

import pytest
import torch
from PIL import Image
from safetensors import safe_open

from kimivl_lab import KimiVLConfig, KimiVLEncoder, MoonViTConfig, MoonVitPretrainedModel
from kimivl_lab.commands import encode as encode_files_module
from kimivl_lab.commands import main as cli
from kimivl_lab.commands.feature_file import FeatureFile
from kimivl_lab.images.processor import KimiVLImageProcessor


@pytest.fixture
def pictures(tmp_path):
    """A folder with three pictures of different sizes and a text file, and a second picture called a.png elsewhere."""
    generator = torch.Generator().manual_seed(3)
    for name, (width, height) in {
        "in/a.png": (60, 30),
        "in/b.png": (28, 84),
        "in/c.jpg": (1, 1),
        "a.png": (90, 56),
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        levels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(levels.numpy()).save(path)
    (tmp_path / "in" / "notes.txt").write_text("not a picture")
    return tmp_path


def run(*arguments):
    return cli.main(["encode", "--preset", "tiny", "--device", "cpu", *map(str, arguments)])


def read(path):
    """Tensors by name, and metadata."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def expected(paths, model, **settings):
    """What the library gives for each path alone."""
    processor = KimiVLImageProcessor(**settings)
    with torch.inference_mode():
        batches = [processor(path) for path in paths]
        return [model.eval()(batch.pixel_values, batch.image_grid_hws) for batch in batches]


def tiny_random_tower(seed):
    torch.manual_seed(seed)
    return MoonVitPretrainedModel(MoonViTConfig.preset("tiny"))


def test_a_folder_and_a_file_become_one_tensor_a_picture(pictures, capsys):
    out = pictures / "new" / "features.safetensors"
    assert run(pictures / "in", pictures / "a.png", "--out", out, "--seed", 5) == 0
    tensors, metadata = read(out)
    paths = {
        "a.png": pictures / "in" / "a.png",
        "b.png": pictures / "in" / "b.png",
        "c.jpg": pictures / "in" / "c.jpg",
        "a-2.png": pictures / "a.png",
    }
    assert set(tensors) == set(paths)
    for name, features in zip(paths, expected(paths.values(), tiny_random_tower(5)), strict=True):
        torch.testing.assert_close(tensors[name], features, rtol=1e-5, atol=1e-5)
    assert json.loads(metadata["grids"]) == {"a.png": [4, 6], "b.png": [6, 2], "c.jpg": [2, 2], "a-2.png": [4, 8]}
    assert (metadata["preset"], metadata["seed"]) == ("tiny", "5")
    assert json.loads(metadata["versions"])["torch"] == torch.__version__
    output = capsys.readouterr()
    assert output.err == ""
    assert "RANDOM" in output.out
    for cell in ("60 x 30", "4 x 6", "24", "6"):
        assert cell in output.out


def test_projected_rows_are_the_language_models(pictures):
    out = pictures / "rows.safetensors"
    assert run(pictures / "a.png", "--out", out, "--projected") == 0
    torch.manual_seed(0)
    encoder = KimiVLEncoder(KimiVLConfig.preset("tiny"))
    tensors, _ = read(out)
    (rows,) = expected([pictures / "a.png"], encoder)
    assert tensors["a.png"].shape == (8, 64)
    torch.testing.assert_close(tensors["a.png"], rows, rtol=1e-5, atol=1e-5)


@pytest.fixture
def bad(pictures):
    """Unusable pictures, and a word of each one's reason."""
    (pictures / "empty.png").touch()
    Image.new("RGB", (20000, 28)).save(pictures / "wide.png")
    Image.new("RGB", (300, 200), (200, 10, 3)).save(pictures / "cut.jpg")
    (pictures / "cut.jpg").write_bytes((pictures / "cut.jpg").read_bytes()[:-200])
    return {
        pictures / "in" / "notes.txt": "not a picture",
        pictures / "empty.png": "empty",
        pictures / "missing.png": "no such file",
        pictures / "wide.png": "512",
        pictures / "cut.jpg": "truncated",
    }


def test_bad_pictures_cost_only_themselves(pictures, bad, capsys):
    out = pictures / "features.safetensors"
    assert run(*bad, pictures / "a.png", "--out", out) == 2
    tensors, metadata = read(out)
    assert set(tensors) == {"a.png"}
    assert json.loads(metadata["grids"]) == {"a.png": [4, 8]}
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(bad)
    for line, (path, reason) in zip(lines, bad.items(), strict=True):
        assert line.startswith(f"kimivl-lab: error: {path}: ")
        assert reason in line


def test_strict_writes_nothing(pictures, bad, capsys):
    out = pictures / "features.safetensors"
    out.write_text("as it was")
    before = sorted(pictures.iterdir())
    assert run(pictures / "a.png", *bad, "--out", out, "--strict") == 2
    assert out.read_text() == "as it was"
    assert sorted(pictures.iterdir()) == before
    assert len(capsys.readouterr().err.splitlines()) == len(bad) + 1


def test_no_good_picture_writes_nothing(pictures, capsys):
    out = pictures / "features.safetensors"
    assert run(pictures / "missing.png", "--out", out) == 2
    assert not out.exists()
    assert "no picture could be read" in capsys.readouterr().err


def test_a_folder_without_pictures_is_named(tmp_path, capsys):
    assert run(tmp_path, "--out", tmp_path / "features.safetensors") == 2
    assert f"{tmp_path}: no pictures" in capsys.readouterr().err


@pytest.mark.parametrize("out", ["in", "a.png/features.safetensors"], ids=["a folder", "below a file"])
def test_an_unwritable_output_is_refused_before_the_work(pictures, out, monkeypatch, capsys):
    monkeypatch.setattr(cli, "_load", lambda arguments: pytest.fail("the model was built first"))
    assert run(pictures / "a.png", "--out", pictures / out) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"kimivl-lab: error: cannot write {pictures / out}: ")


def test_batches_are_bounded_and_change_no_value(pictures, monkeypatch):
    whole, cut = pictures / "whole.safetensors", pictures / "cut.safetensors"
    assert run(pictures / "in", pictures / "a.png", "--out", whole) == 0
    sizes = []
    forward = MoonVitPretrainedModel.forward

    def counting(self, pixel_values, *arguments, **keywords):
        sizes.append(len(pixel_values))
        return forward(self, pixel_values, *arguments, **keywords)

    monkeypatch.setattr(MoonVitPretrainedModel, "forward", counting)
    monkeypatch.setattr(encode_files_module, "BATCH_PATCHES", 30)
    assert run(pictures / "in", pictures / "a.png", "--out", cut) == 0
    assert sizes == [24, 12 + 4, 32]
    (left, _), (right, _) = read(whole), read(cut)
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=1e-5, atol=1e-5)


@pytest.fixture
def checkpoint(tmp_path):
    """A tiny Kimi-VL checkpoint with its own processor settings, and the encoder it was saved from."""
    torch.manual_seed(11)
    encoder = KimiVLEncoder(KimiVLConfig.preset("tiny"))
    encoder.save_pretrained(tmp_path / "checkpoint")
    KimiVLImageProcessor(in_token_limit=8).save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint", encoder


@pytest.mark.parametrize(("option", "limit"), [([], 8), (["--in-token-limit", "4"], 4)])
def test_a_checkpoint_gives_weights_and_processor_settings(pictures, checkpoint, option, limit, capsys):
    folder, encoder = checkpoint
    out = pictures / "features.safetensors"
    arguments = [str(pictures / "a.png"), "--checkpoint", str(folder), "--device", "cpu", "--out", str(out), *option]
    assert cli.main(["encode", *arguments]) == 0
    tensors, metadata = read(out)
    (features,) = expected([pictures / "a.png"], encoder.vision_tower, in_token_limit=limit)
    torch.testing.assert_close(tensors["a.png"], features, rtol=1e-5, atol=1e-5)
    assert metadata["weights"] == str(folder)
    assert "RANDOM" not in capsys.readouterr().out


def test_a_checkpoint_that_cannot_be_loaded_is_named(pictures, checkpoint, capsys):
    folder, _ = checkpoint
    arguments = ["encode", str(pictures / "a.png"), "--out", str(pictures / "f.safetensors"), "--checkpoint"]
    assert cli.main([*arguments, str(pictures)]) == 2
    assert f"{pictures}: no config.json" in capsys.readouterr().err
    (folder / "model.safetensors").unlink()
    assert cli.main([*arguments, str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(folder) in line and "model.safetensors" in line
    assert not (pictures / "f.safetensors").exists()


def test_bfloat16_is_written_as_bfloat16(pictures):
    out = pictures / "features.safetensors"
    assert run(pictures / "a.png", "--out", out, "--dtype", "bfloat16") == 0
    tensors, _ = read(out)
    (features,) = expected([pictures / "a.png"], tiny_random_tower(0).to(torch.bfloat16))
    assert tensors["a.png"].dtype == torch.bfloat16
    torch.testing.assert_close(tensors["a.png"], features)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_an_absent_device_is_an_error(pictures, capsys):
    assert run(pictures / "a.png", "--out", pictures / "f.safetensors", "--device", "cuda") == 2
    assert "CUDA" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--checkpoint", "folder"], ["--in-token-limit", "0"], ["--dtype", "int8"], ["--no-such-option"]],
    ids=lambda arguments: arguments[0],
)
def test_arguments_that_make_no_sense_are_refused(pictures, arguments):
    with pytest.raises(SystemExit, match="2"):
        run(pictures / "a.png", "--out", pictures / "f.safetensors", *arguments)


def test_info_names_machine_versions_and_backends():
    done = subprocess.run([sys.executable, "-m", "kimivl_lab.cli", "info"], capture_output=True, text=True, check=True)
    for word in ("torch", torch.__version__, "transformers", "attention sdpa", "attention eager", "runs here"):
        assert word in done.stdout
    assert done.stderr == ""


def test_help_imports_nothing_heavy():
    program = (
        "import sys\nfrom kimivl_lab.commands import main as module\n"
        "try:\n    module.main(['encode', '--help'])\n"
        "finally:\n    print(sorted({'torch', 'transformers', 'rich', 'PIL'} & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0
    assert "--in-token-limit" in done.stdout
    assert done.stderr.strip() == "[]"


def test_presets_of_the_command_line_are_the_librarys():
    from kimivl_lab.config import PRESETS

    assert set(cli.PRESETS) == set(PRESETS)


def test_feature_file_holds_any_name_and_dtype(tmp_path):
    tensors = {
        'quoted "name" with \\ and é.png': torch.arange(24, dtype=torch.float32).reshape(2, 3, 4),
        "b" * 200: torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
        "view": torch.arange(12, dtype=torch.float16).reshape(3, 4).t(),
    }
    path = tmp_path / "features.safetensors"
    with FeatureFile(path, [*tensors, "never added"], {"note": "a longer note"}) as file:
        for name, tensor in tensors.items():
            file.add(name, tensor)
        with pytest.raises(ValueError, match="already"):
            file.add("view", tensors["view"])
        file.metadata["note"] = "shorter"
    got, metadata = read(path)
    assert metadata == {"note": "shorter"}
    assert set(got) == set(tensors)
    for name, tensor in tensors.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor)


def test_feature_file_leaves_the_old_file_after_a_failure(tmp_path):
    path = tmp_path / "features.safetensors"
    path.write_text("old")
    with pytest.raises(RuntimeError), FeatureFile(path, ["a"], {}) as file:
        file.add("a", torch.ones(2))
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
