"""The command line, with the tiny preset: what it writes, says and refuses."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from transformers.utils.hub import get_checkpoint_shard_files

from kimivl_lab import KimiVLConfig, KimiVLEncoder, MoonViTConfig, MoonVitPretrainedModel
from kimivl_lab.commands import encode as encode_command
from kimivl_lab.commands import main as cli
from kimivl_lab.commands.feature_file import FeatureFile
from kimivl_lab.images.processor import KimiVLImageProcessor


@pytest.fixture
def images(tmp_path):
    """A folder with three images of different sizes and a text file, and a second image called a.png elsewhere."""
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
    (tmp_path / "in" / "notes.txt").write_text("not an image")
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


def test_a_folder_and_a_file_become_one_tensor_an_image(images, capsys):
    out = images / "new" / "features.safetensors"
    assert run(images / "in", images / "a.png", "--out", out, "--seed", 5) == 0
    tensors, metadata = read(out)
    paths = {
        "a.png": images / "in" / "a.png",
        "b.png": images / "in" / "b.png",
        "c.jpg": images / "in" / "c.jpg",
        "a-2.png": images / "a.png",
    }
    assert set(tensors) == set(paths)
    for name, features in zip(paths, expected(paths.values(), tiny_random_tower(5)), strict=True):
        torch.testing.assert_close(tensors[name], features, rtol=1e-5, atol=1e-5)
    assert json.loads(metadata["grids"]) == {"a.png": [4, 6], "b.png": [6, 2], "c.jpg": [2, 2], "a-2.png": [4, 8]}
    assert (metadata["preset"], metadata["seed"]) == ("tiny", "5")
    assert json.loads(metadata["versions"])["torch"] == importlib.metadata.version("torch")
    output = capsys.readouterr()
    assert output.err == ""
    assert "RANDOM" in output.out
    for cell in ("60 x 30", "4 x 6", "24", "6"):
        assert cell in output.out


def test_projected_rows_are_the_language_models(images):
    out = images / "rows.safetensors"
    assert run(images / "a.png", "--out", out, "--projected") == 0
    torch.manual_seed(0)
    encoder = KimiVLEncoder(KimiVLConfig.preset("tiny"))
    tensors, _ = read(out)
    (rows,) = expected([images / "a.png"], encoder)
    assert tensors["a.png"].shape == (8, 64)
    torch.testing.assert_close(tensors["a.png"], rows, rtol=1e-5, atol=1e-5)


@pytest.fixture
def bad(images):
    """Unusable images, and a word of each one's reason."""
    (images / "empty.png").touch()
    Image.new("RGB", (20000, 28)).save(images / "wide.png")
    Image.new("RGB", (300, 200), (200, 10, 3)).save(images / "cut.jpg")
    (images / "cut.jpg").write_bytes((images / "cut.jpg").read_bytes()[:-200])
    return {
        images / "in" / "notes.txt": "not a",
        images / "empty.png": "empty",
        images / "missing.png": "no such file",
        images / "wide.png": "512",
        images / "cut.jpg": "truncated",
    }


def test_bad_images_cost_only_themselves(images, bad, capsys):
    out = images / "features.safetensors"
    assert run(*bad, images / "a.png", "--out", out) == 2
    tensors, metadata = read(out)
    assert set(tensors) == {"a.png"}
    assert json.loads(metadata["grids"]) == {"a.png": [4, 8]}
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(bad)
    for line, (path, reason) in zip(lines, bad.items(), strict=True):
        assert line.startswith(f"kimivl-lab: error: {path}: ")
        assert reason in line


def test_strict_writes_nothing(images, bad, capsys):
    out = images / "features.safetensors"
    out.write_text("as it was")
    before = sorted(images.iterdir())
    assert run(images / "a.png", *bad, "--out", out, "--strict") == 2
    assert out.read_text() == "as it was"
    assert sorted(images.iterdir()) == before
    assert len(capsys.readouterr().err.splitlines()) == len(bad) + 1


def test_no_good_image_writes_nothing(images, capsys):
    out = images / "features.safetensors"
    assert run(images / "missing.png", "--out", out) == 2
    assert not out.exists()
    assert "no image could be read" in capsys.readouterr().err


def test_a_folder_without_images_is_named(tmp_path, capsys):
    assert run(tmp_path, "--out", tmp_path / "features.safetensors") == 2
    assert f"{tmp_path}: no images" in capsys.readouterr().err


@pytest.mark.parametrize("out", ["in", "a.png/features.safetensors"], ids=["a folder", "below a file"])
def test_an_unwritable_output_is_refused_before_the_work(images, out, monkeypatch, capsys):
    monkeypatch.setattr(encode_command, "_load", lambda arguments: pytest.fail("the model was built first"))
    assert run(images / "a.png", "--out", images / out) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"kimivl-lab: error: cannot write {images / out}: ")


def test_batches_are_bounded_and_change_no_value(images, monkeypatch):
    whole, cut = images / "whole.safetensors", images / "cut.safetensors"
    assert run(images / "in", images / "a.png", "--out", whole) == 0
    sizes = []
    forward = MoonVitPretrainedModel.forward

    def counting(self, pixel_values, *arguments, **keywords):
        sizes.append(len(pixel_values))
        return forward(self, pixel_values, *arguments, **keywords)

    monkeypatch.setattr(MoonVitPretrainedModel, "forward", counting)
    monkeypatch.setattr(encode_command, "BATCH_PATCHES", 30)
    assert run(images / "in", images / "a.png", "--out", cut) == 0
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
def test_a_checkpoint_gives_weights_and_processor_settings(images, checkpoint, option, limit, capsys):
    folder, encoder = checkpoint
    out = images / "features.safetensors"
    arguments = [str(images / "a.png"), "--checkpoint", str(folder), "--device", "cpu", "--out", str(out), *option]
    assert cli.main(["encode", *arguments]) == 0
    tensors, metadata = read(out)
    (features,) = expected([images / "a.png"], encoder.vision_tower, in_token_limit=limit)
    torch.testing.assert_close(tensors["a.png"], features, rtol=1e-5, atol=1e-5)
    assert metadata["weights"] == str(folder)
    assert "RANDOM" not in capsys.readouterr().out


def test_a_checkpoint_that_cannot_be_loaded_is_named(images, checkpoint, capsys):
    folder, _ = checkpoint
    arguments = ["encode", str(images / "a.png"), "--out", str(images / "f.safetensors"), "--checkpoint"]
    assert cli.main([*arguments, str(images)]) == 2
    assert f"{images}: no config.json" in capsys.readouterr().err
    (folder / "model.safetensors").unlink()
    assert cli.main([*arguments, str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(folder) in line and "model.safetensors" in line
    assert not (images / "f.safetensors").exists()


def test_bfloat16_is_written_as_bfloat16(images):
    out = images / "features.safetensors"
    assert run(images / "a.png", "--out", out, "--dtype", "bfloat16") == 0
    tensors, _ = read(out)
    (features,) = expected([images / "a.png"], tiny_random_tower(0).to(torch.bfloat16))
    assert tensors["a.png"].dtype == torch.bfloat16
    torch.testing.assert_close(tensors["a.png"], features)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_an_absent_device_is_an_error(images, capsys):
    assert run(images / "a.png", "--out", images / "f.safetensors", "--device", "cuda") == 2
    assert "CUDA" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--checkpoint", "folder"], ["--in-token-limit", "0"], ["--dtype", "int8"], ["--no-such-option"]],
    ids=lambda arguments: arguments[0],
)
def test_arguments_that_make_no_sense_are_refused(images, arguments):
    with pytest.raises(SystemExit, match="2"):
        run(images / "a.png", "--out", images / "f.safetensors", *arguments)


def test_info_names_machine_versions_and_backends():
    done = subprocess.run([sys.executable, "-m", "kimivl_lab.cli", "info"], capture_output=True, text=True, check=True)
    for word in (
        "torch",
        importlib.metadata.version("torch"),  # torch.__version__ may add the CUDA version
        "transformers",
        "attention sdpa",
        "attention eager",
        "runs here",
        "float32 tower",
        "computes in",
    ):
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


def test_every_preset_of_the_library_is_accepted_and_others_are_named(images, monkeypatch, capsys):
    from kimivl_lab.config import PRESETS

    monkeypatch.setattr(encode_command, "MoonVitPretrainedModel", lambda config: pytest.fail("a model was built"))
    assert run(images / "a.png", "--out", images / "f.safetensors", "--preset", "large") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "'large'" in line and all(preset in line for preset in PRESETS)
    assert not (images / "f.safetensors").exists()


NAMES = {
    'quoted "name" with \\ and é.png': torch.arange(24, dtype=torch.float32).reshape(2, 3, 4),
    "b" * 200: torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
    "view": torch.arange(12, dtype=torch.float16).reshape(3, 4).t(),
}


def write(path, tensors, max_shard_bytes=2**30, metadata=None):
    with FeatureFile(path, metadata or {}, max_shard_bytes) as file:
        for name, tensor in tensors.items():
            file.add(name, tensor, (len(tensor), 2))


def read_shards(path):
    """All tensors behind an index, found as transformers finds those of a checkpoint, and each shard's metadata."""
    index = Path(f"{path}.index.json")
    files, _ = get_checkpoint_shard_files(str(path.parent), str(index))
    parts = [read(file) for file in files]
    weight_map = json.loads(index.read_text())["weight_map"]
    assert {name: Path(file).name for file, (part, _) in zip(files, parts, strict=True) for name in part} == weight_map
    return {name: tensor for part, _ in parts for name, tensor in part.items()}, [metadata for _, metadata in parts]


def test_a_feature_file_holds_any_name_and_dtype(tmp_path):
    path = tmp_path / "features.safetensors"
    write(path, NAMES, metadata={"note": "a note"})
    got, metadata = read(path)
    assert metadata["note"] == "a note"
    assert json.loads(metadata["grids"]) == {name: [len(tensor), 2] for name, tensor in NAMES.items()}
    assert set(got) == set(NAMES)
    for name, tensor in NAMES.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor)
    (tmp_path / "other").touch()
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode
    with pytest.raises(ValueError, match="already"), FeatureFile(path, {}, 2**30) as file:
        file.add("twice", torch.ones(2), (2, 2))
        file.add("twice", torch.ones(2), (2, 2))


def test_past_a_size_there_are_shards_and_an_index(tmp_path):
    path = tmp_path / "features.safetensors"
    tensors = {f"{mib}.png": torch.full((mib, 2**18), float(mib)) for mib in (5, 9, 3, 20, 1, 7)}
    write(path, tensors, 16 * 2**20, {"seed": "0"})
    got, metadata = read_shards(path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        *(f"features-0000{number}-of-00004.safetensors" for number in (1, 2, 3, 4)),
        "features.safetensors.index.json",
    ]
    assert got.keys() == tensors.keys() and all(torch.equal(got[name], tensors[name]) for name in tensors)
    assert [list(json.loads(one["grids"])) for one in metadata] == [
        ["5.png", "9.png"],
        ["3.png"],
        ["20.png"],  # larger than the bound: alone
        ["1.png", "7.png"],
    ]
    index = json.loads((tmp_path / "features.safetensors.index.json").read_text())["metadata"]
    assert index["total_size"] == sum(tensor.nbytes for tensor in tensors.values()) and index["seed"] == "0"
    assert json.loads(index["grids"]).keys() == tensors.keys()


def test_a_later_result_leaves_nothing_of_an_earlier_one(tmp_path):
    path = tmp_path / "features.safetensors"
    other = tmp_path / "features-of-others.safetensors"
    other.write_text("kept")
    small = {name: torch.ones(4, 4) for name in "abcde"}
    write(path, small, 64)
    assert len(list(tmp_path.iterdir())) == 1 + 5 + 1
    write(path, small, 128)
    assert len(list(tmp_path.iterdir())) == 1 + 3 + 1 and read_shards(path)[0].keys() == small.keys()
    write(path, small)
    assert sorted(tmp_path.iterdir()) == [other, path]
    write(path, small, 128)
    assert not path.exists() and read_shards(path)[0].keys() == small.keys()


@pytest.mark.parametrize("bound", [2**30, 8])
def test_a_feature_file_leaves_the_old_files_after_a_failure(tmp_path, bound):
    path = tmp_path / "features.safetensors"
    write(path, {name: torch.zeros(2) for name in "abc"}, bound)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(RuntimeError), FeatureFile(path, {}, bound) as file:
        for name in "xyz":
            file.add(name, torch.ones(2), (2, 2))
        raise RuntimeError
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_the_command_writes_shards_of_the_wanted_size(images, capsys):
    """Two images of 1.2 MiB each, and a bound of 2 MiB."""
    for name in ("x.png", "y.png"):
        Image.new("RGB", (448, 448)).save(images / name)
    out = images / "features.safetensors"
    paths = [images / name for name in ("x.png", "y.png", "a.png")]
    assert run(*paths, "--out", out, "--max-shard-mib", 2) == 0
    got, metadata = read_shards(out)
    for name, features in zip(("x.png", "y.png", "a.png"), expected(paths, tiny_random_tower(0)), strict=True):
        torch.testing.assert_close(got[name], features, rtol=1e-5, atol=1e-5)
    assert [list(json.loads(one["grids"])) for one in metadata] == [["x.png"], ["y.png", "a.png"]]
