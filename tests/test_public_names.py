"""The names that users import from the package itself."""

import importlib
import subprocess
import sys

import pytest

import kimivl_lab

PROMISED = {
    *("MoonViTConfig", "KimiVLConfig", "MoonVitPretrainedModel", "EncoderMetadata", "prepare_encoder_metadata"),
    *("KimiVLImageProcessor", "KimiVLEncoder", "EncoderCudaGraphRunner", "plan_budgets"),
    *("run_dp_sharded_vision_model", "count_host_syncs", "on_device", "split_image_features", "image_geometry"),
    *("build_merge_gather_idx", "patch_merger", "patch_merger_packed", "EncoderOptions"),
    "KimiVLForConditionalGeneration",
}


def test_every_promised_name_is_listed():
    assert set(kimivl_lab.__all__) >= PROMISED
    assert kimivl_lab.__all__ == sorted(kimivl_lab.__all__)


def test_names_are_listed_before_their_first_use_and_nothing_heavy_is_imported():
    program = "import sys, kimivl_lab\nprint(set(kimivl_lab.__all__) <= set(dir(kimivl_lab)), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


@pytest.mark.parametrize("name", kimivl_lab.__all__)
def test_a_name_is_what_its_module_defines(name):
    value = getattr(kimivl_lab, name)
    assert value.__name__ == name
    assert getattr(importlib.import_module(value.__module__), name) is value


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        kimivl_lab.no_such_name  # noqa: B018


def test_names_are_kept_where_they_were():
    """Import paths beside the package's names, which users and records of commands rely on."""
    from kimivl_lab.cli import main
    from kimivl_lab.measure.syncs import on_device
    from kimivl_lab.moonvit.attention import ATTENTION_BACKENDS
    from kimivl_lab.moonvit.position import POSITION_OPERATORS
    from kimivl_lab.moonvit.position_cache import PositionCache
    from kimivl_lab.parallel.groups import init_group

    assert on_device is kimivl_lab.on_device and callable(main) and callable(init_group) and callable(PositionCache)
    assert "eager" in ATTENTION_BACKENDS and "interpolate" in POSITION_OPERATORS
