"""Shared builders: towers and pixels with contents that reveal order."""

import json
import os
from contextlib import suppress
from typing import TypeVar

import pytest
import torch

from kimivl_lab import EncoderOptions, KimiVLConfig, KimiVLEncoder, MoonViTConfig, MoonVitPretrainedModel
from kimivl_lab.geometry import patch_counts

with suppress(ModuleNotFoundError):  # the tests marked gpu run without it
    from hypothesis import settings

    settings.register_profile("ci", derandomize=True)  # the same examples each time; elsewhere new ones are searched
    if os.environ.get("CI"):
        settings.load_profile("ci")

MIXED_GRIDS = [(4, 6), (2, 2), (10, 4), (2, 12)]


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def foreign_environment(tmp_path, monkeypatch):
    """A machine set up for other work: no figures, another environment's kernel called python3, other threads."""
    kernel = tmp_path / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    spec = {"argv": ["false"], "display_name": "Another environment", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")


Module = TypeVar("Module", bound=torch.nn.Module)


def randomise(module: Module, seed: int) -> Module:
    """Weights large enough that every stage matters: biases, norms and the position table included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name and name.endswith("weight"):
                parameter.copy_(1 + 0.2 * noise)
            elif parameter.ndim > 1 and "pos_emb" not in name:
                parameter.copy_(noise / parameter[0].numel() ** 0.5)
            else:
                parameter.copy_(0.3 * noise)
    return module


def tiny_tower(seed: int = 0, options: EncoderOptions | None = None, **overrides) -> MoonVitPretrainedModel:
    return randomise(MoonVitPretrainedModel(MoonViTConfig.preset("tiny", **overrides), options), seed).eval()


def small_tower(seed: int = 0, options: EncoderOptions | None = None) -> MoonVitPretrainedModel:
    """Of 2 narrow layers, for tests that call it many times."""
    return tiny_tower(seed, options, hidden_size=32, intermediate_size=48)


def tiny_encoder(seed: int = 0) -> KimiVLEncoder:
    return randomise(KimiVLEncoder(KimiVLConfig.preset("tiny")), seed).eval()


def pixels_for(grids, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    """Different contents in every patch, of unit scale."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(patch_counts(grids)), 3, 14, 14, generator=generator).to(dtype)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the wanted."""
    assert got.shape == want.shape, (got.shape, want.shape)
    return ((got.double() - want.double()).norm() / want.double().norm()).item()
