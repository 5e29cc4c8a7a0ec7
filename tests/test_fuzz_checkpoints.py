"""Damaged checkpoints: loading gives the tensors that the files hold, or a ValueError or OSError that names the file.

Seeded. `--long` damages 400 checkpoints, else 30.
"""

import json
import math
import random
import shutil
import warnings

import numpy as np
import pytest
import torch
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging

from kimivl_lab import KimiVLConfig, KimiVLForConditionalGeneration, MoonViTConfig, MoonVitPretrainedModel
from tests.conftest import randomise
from tests.test_fuzz_images import changed, within
from tests.tiny_kimi_vl import tiny_json

DTYPES = {"F32": "<f4", "F16": "<f2", "F64": "<f8"}


@pytest.fixture(scope="module", params=[MoonVitPretrainedModel, KimiVLForConditionalGeneration])
def whole(request, tmp_path_factory):
    """A class, and folders of a small model of it: a single file, and shards with an index."""
    if request.param is MoonVitPretrainedModel:
        model = MoonVitPretrainedModel(MoonViTConfig.preset("tiny", hidden_size=32, intermediate_size=48))
    else:
        model = KimiVLForConditionalGeneration(KimiVLConfig(**tiny_json()))
    model = randomise(model, 0)
    folders = [tmp_path_factory.mktemp("single"), tmp_path_factory.mktemp("sharded")]
    model.save_pretrained(folders[0])
    model.save_pretrained(folders[1], max_shard_size="100KB")
    assert not (folders[0] / "model.safetensors.index.json").exists()
    assert len(list(folders[1].glob("*.safetensors"))) > 2
    return request.param, folders


def stored(folder) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, by a plain reading of the format. Raises anything where the files are broken."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if single.exists():
        files = {single: None}
    else:
        names = json.loads(index.read_text())["weight_map"]
        files = {folder / file: {name for name in names if names[name] == file} for file in set(names.values())}
    tensors = {}
    for path, wanted in files.items():
        content = path.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start])
        for name, entry in header.items():
            if name == "__metadata__" or (wanted is not None and name not in wanted):
                continue
            begin, end = entry["data_offsets"]
            values = np.frombuffer(
                content[start:], dtype=DTYPES[entry["dtype"]], count=math.prod(entry["shape"]), offset=begin
            )
            assert values.nbytes == end - begin
            tensors[name] = torch.from_numpy(values.reshape(entry["shape"]).copy())
    return tensors


def damage(folder, rng: random.Random) -> str:
    """Damages one file in the folder; says which and how."""
    path = rng.choice(sorted(folder.iterdir()))
    content = path.read_bytes()
    kind = rng.choice(["bytes", "bytes", "values", "values", "header", "cut", "empty", "pointer", "gone", "other"])
    if kind == "bytes":
        path.write_bytes(changed(content, rng))
    elif kind == "values":  # of a tensor, at the same length
        path = rng.choice(sorted(folder.glob("*.safetensors")))
        content = bytearray(path.read_bytes())
        start = 8 + int.from_bytes(content[:8], "little")
        at = rng.randrange(start, len(content) - 40)
        content[at : at + 40] = rng.randbytes(40)
        path.write_bytes(content)
    elif kind == "header" and path.suffix == ".safetensors":
        start = 8 + int.from_bytes(content[:8], "little")
        header = changed(content[8:start], rng)
        path.write_bytes(len(header).to_bytes(8, "little") + header + content[start:])
    elif kind == "header":
        values = json.loads(content)
        at = values.get("weight_map", values)
        name = rng.choice(sorted(at))
        at[name] = rng.choice([None, "x", -1, 0, [], {}, 10**9, True, 0.5])
        path.write_text(json.dumps(values))
    elif kind == "cut":
        path.write_bytes(content[: rng.randrange(len(content))])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "pointer":
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    elif kind == "gone":
        path.unlink()
    else:
        path.write_bytes(rng.choice([b"{}", b"[]", b"null", b"{", b"\xff\xfe", b'{"weight_map": 3}']))
    return f"{path.name}, {kind}"


def test_a_damaged_checkpoint_is_named_or_read_as_it_is(whole, tmp_path, is_long):
    logging.disable_progress_bar()
    model_class, folders = whole
    loaded = 0
    for seed in range(400 if is_long else 30):
        rng = random.Random(seed)
        folder = tmp_path / f"checkpoint-{seed}"
        shutil.copytree(rng.choice(folders), folder)
        what = damage(folder, rng)
        try:
            with within(60), warnings.catch_warnings(action="ignore"):
                model = model_class.from_pretrained(folder)
        except (ValueError, OSError) as error:
            assert str(folder) in str(error), f"seed {seed}, {what}: {error!r:.500}"
            continue
        except Exception as error:
            raise AssertionError(f"seed {seed}, {what}: {error!r:.500}") from error
        tensors = stored(folder)
        parameters = revert_weight_conversion(model, model.state_dict())  # experts one by one
        assert parameters.keys() <= tensors.keys(), f"seed {seed}, {what}"
        for name, parameter in parameters.items():
            want = tensors[name].to(parameter.dtype)
            bits = torch.int32 if want.dtype == torch.float32 else torch.int16
            same = parameter.shape == want.shape and torch.equal(parameter.contiguous().view(bits), want.view(bits))
            assert same, f"seed {seed}, {what}: {name}"
        loaded += 1
        shutil.rmtree(folder)
    assert loaded, "every damage was found: the test has no case of changed values"
