"""A default device set by the caller moves nothing that must stay on the host."""

import ast
from pathlib import Path

import numpy as np
import pytest
import torch

from kimivl_lab import KimiVLImageProcessor, build_merge_gather_idx
from kimivl_lab.graphs.runner import EncoderCudaGraphRunner
from tests.conftest import pixels_for, tiny_encoder, tiny_tower
from tests.image_oracle import assert_same, noise, oracle

PACKAGE = Path(__file__).parents[1] / "kimivl_lab"
FACTORIES = {"tensor", "as_tensor", "zeros", "empty", "ones", "full", "arange", "linspace", "eye"}
FACTORIES |= {"rand", "randn", "randint", "randperm"}
FOLLOWS_THE_DEFAULT = {"moonvit/position.py": 1}  # a parameter, as in every torch module
GRIDS = [(4, 6), (2, 2)]


def test_every_factory_call_names_its_device():
    """Code of the lessons is exempt: it is read by learners, and notebooks set no default device."""
    found = {}
    for path in set(PACKAGE.rglob("*.py")) - set((PACKAGE / "lessons").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and (node.func.value.id, node.func.attr) in {("torch", name) for name in FACTORIES}
                and "device" not in {keyword.arg for keyword in node.keywords}
            ):
                name = path.relative_to(PACKAGE).as_posix()
                found[name] = found.get(name, 0) + 1
    assert found == FOLLOWS_THE_DEFAULT


def test_the_processor_stays_on_the_host():
    image = noise(50, 40)
    with torch.device("meta"):
        batch = KimiVLImageProcessor()([image, np.array(noise(30, 30, "L"))])
        levels = KimiVLImageProcessor(return_uint8=True)(image)
    assert_same(batch, *oracle([image, noise(30, 30, "L")]))
    assert levels.pixel_values.device.type == batch.image_grid_hws.device.type == "cpu"


@pytest.mark.parametrize("position", ["interpolate", "adaptive", "cached"])
@pytest.mark.parametrize("rope", ["complex", "real", "in_place"])
def test_metadata_and_forward_stay_with_the_tower(position, rope):
    tower, pixels = tiny_tower(), pixels_for(GRIDS)
    tower.set_options(position=position, rope=rope)
    want = tower(pixels, GRIDS)
    tower = tiny_tower()  # nothing cached
    tower.set_options(position=position, rope=rope)
    with torch.device("meta"):
        metadata = tower.prepare_encoder_metadata(GRIDS, max_images=4)
        got = tower(pixels, GRIDS)
    tensors = [value for value in vars(metadata).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 4 and {tensor.device.type for tensor in tensors} == {"cpu"}
    assert torch.equal(got, want)


def test_a_set_default_device_counts_like_a_context():
    encoder, pixels = tiny_encoder(), pixels_for(GRIDS)
    want, index = encoder(pixels, GRIDS), build_merge_gather_idx(GRIDS)
    torch.set_default_device("meta")
    try:
        got, again = encoder(pixels, GRIDS), build_merge_gather_idx(GRIDS)
        runner = EncoderCudaGraphRunner(encoder, budgets=[16], max_images=4, backend="trace")
        runner.capture()
        replayed = runner(pixels, GRIDS)
    finally:
        torch.set_default_device(None)
    assert torch.equal(got, want) and torch.equal(again, index)
    assert replayed.shape == want.shape and torch.allclose(replayed, want, atol=1e-4)
