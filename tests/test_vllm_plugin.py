"""The plugin for vLLM as far as it needs no engine: parts, the check of the release, what registering imports.

`make test-engine` runs the rest in a real vLLM.
"""

import pkgutil
import subprocess
import sys
import tomllib
from itertools import accumulate
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import kimivl_lab_vllm
from kimivl_lab import MoonViTConfig, MoonVitPretrainedModel, count_host_syncs, on_device
from kimivl_lab.engines.vllm.graph_inputs import graph_values, write_offsets
from kimivl_lab.engines.vllm.parts import DEFAULT, KNOWN, SEAMS, TESTED, Parts, check_engine
from kimivl_lab.planner.vllm import READ_IN


@pytest.fixture
def stub(monkeypatch):
    """Modules in vLLM's places that have every seam, and the tables that a plugin writes to."""
    modules = {"vllm": SimpleNamespace(__version__=f"{TESTED}.0+cpu")}
    for module, names in SEAMS.items():
        modules[module] = SimpleNamespace()
        for name in names:
            owner = modules[module]
            *outer, last = name.split(".")
            for part in outer:
                vars(owner).setdefault(part, SimpleNamespace())
                owner = getattr(owner, part)
            setattr(owner, last, object())
    entered = {}
    modules["vllm"].ModelRegistry = SimpleNamespace(register_model=entered.__setitem__)
    modules["vllm.model_executor.models.config"] = SimpleNamespace(MODELS_CONFIG_MAP={})
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(vars(contents))
        parts = name.split(".")
        for end in range(1, len(parts)):
            parent = ".".join(parts[:end])
            if parent not in modules and parent not in sys.modules:
                monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        monkeypatch.setitem(sys.modules, name, module)
    return entered


def test_the_entry_point_is_the_function():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    (target,) = project["project"]["entry-points"]["vllm.general_plugins"].values()
    assert pkgutil.resolve_name(target) is kimivl_lab_vllm.register
    assert "kimivl_lab_vllm" in project["tool"]["setuptools"]["py-modules"]


def test_registering_adds_one_architecture_and_imports_nothing_of_the_package(stub):
    kimivl_lab_vllm.register()
    assert stub == {kimivl_lab_vllm.ARCHITECTURE: f"kimivl_lab.engines.vllm.model:{kimivl_lab_vllm.ARCHITECTURE}"}
    hooks = sys.modules["vllm.model_executor.models.config"].MODELS_CONFIG_MAP
    assert hooks == {kimivl_lab_vllm.ARCHITECTURE: kimivl_lab_vllm.ConfigHook}


@pytest.mark.parametrize("module", ["kimivl_lab_vllm", "kimivl_lab.engines.vllm", "kimivl_lab.engines.vllm.parts"])
def test_importing_the_plugin_costs_nothing(module):
    program = f"import sys, {module}; print(*(name in sys.modules for name in ('vllm', 'torch', 'transformers')))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"] * 3


def test_the_plugin_is_not_in_the_package():
    """So that a server which does not ask for it keeps transformers' tables."""
    program = "import sys, kimivl_lab_vllm; print('kimivl_lab' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


@pytest.mark.parametrize("given", [["processor"], ["processor", "tower"], ("tower", "processor", "metadata")])
def test_parts_that_go_together(given):
    assert tuple(Parts(given)) == tuple(given)


@pytest.mark.parametrize("given", [[], "tower", ["tower"], ["processor", "graph"], ["processor", "processor"], None, 3])
def test_other_parts_are_refused(given):
    with pytest.raises(ValueError, match="kimivl_lab_parts") as error:
        Parts(given)
    assert all(name in str(error.value) for name in KNOWN) and repr(given) in str(error.value)


def test_a_configuration_names_its_parts(stub):
    config = SimpleNamespace()
    kimivl_lab_vllm.ConfigHook.verify_and_update_model_config(SimpleNamespace(hf_config=config))
    assert config.kimivl_lab_parts == DEFAULT and type(config.kimivl_lab_parts) is Parts
    config.kimivl_lab_parts = ["processor", "speed"]
    with pytest.raises(ValueError, match="speed"):
        kimivl_lab_vllm.ConfigHook.verify_and_update_model_config(SimpleNamespace(hf_config=config))


@pytest.mark.parametrize("version, warns", [("0.32.0", False), ("0.32.1+cpu", False), ("0.33.0", True), ("0.3", True)])
def test_another_release_is_a_warning_that_names_both(stub, caplog, version, warns):
    vars(sys.modules["vllm"])["__version__"] = version
    check_engine()
    assert (TESTED in caplog.text and f"vLLM {version}" in caplog.text) == warns == bool(caplog.records)


@pytest.mark.parametrize("seam", ["MoonVitPretrainedModel", "KimiVLForConditionalGeneration.encoder_cudagraph_forward"])
def test_a_missing_seam_is_named(stub, seam):
    owner = sys.modules["vllm.model_executor.models.kimi_vl"]
    *outer, last = seam.split(".")
    for part in outer:
        owner = getattr(owner, part)
    delattr(owner, last)
    with pytest.raises(RuntimeError, match=f"kimi_vl.{seam}$"):
        check_engine()


@pytest.mark.parametrize(
    ("lengths", "slots", "rows", "expected"),
    [
        ([8, 4], 4, 32, [0, 8, 12, 22, 32]),
        ([8, 4], 3, 12, [0, 8, 12, 12]),  # no padding: the slot for it is empty
        ([8, 4], 3, 40, [0, 8, 12, 40]),
        ([16], 4, 20, [0, 16, 17, 18, 20]),
        ([4, 4, 4], 4, 100, [0, 4, 8, 12, 100]),
    ],
)
def test_padding_is_cut_over_the_unused_slots(lengths, slots, rows, expected):
    offsets = list(accumulate(lengths, initial=0))
    offsets = torch.tensor(offsets + offsets[-1:] * (slots - len(lengths)), dtype=torch.int32)
    buffer = torch.tensor([0, *range(5, 5 + slots - 1), rows], dtype=torch.int32)  # of an earlier replay
    for _ in range(2):
        write_offsets(buffer, offsets)
        assert buffer.tolist() == expected


def test_a_replay_reads_nothing_back():
    offsets = torch.tensor([0, 8, 12, 12, 12], dtype=torch.int32)
    buffer = torch.tensor([0, 8, 16, 24, 32], dtype=torch.int32)
    assert count_host_syncs(write_offsets, on_device(buffer), on_device(offsets)).total == 0


def test_graph_values_are_the_metadata():
    tower = MoonVitPretrainedModel(MoonViTConfig.preset("tiny")).eval()
    metadata = tower.prepare_encoder_metadata([(4, 6), (2, 2)], max_images=4)
    values = graph_values(metadata)
    assert values["max_seqlen"].dtype == torch.int32 and values.pop("max_seqlen").item() == 24
    assert all(value is getattr(metadata, name) for name, value in values.items())


def test_the_planner_was_read_in_the_same_release():
    assert f"vLLM {TESTED}" == READ_IN
