"""Enters Kimi-VL into the tables of transformers' Auto classes, without importing transformers.

After `import kimivl_lab`, `AutoConfig`, `AutoModelForImageTextToText`, `AutoProcessor`, `AutoImageProcessor` and
`AutoTokenizer` know the model type "kimi_vl", and so does `pipeline("image-text-to-text")`. The `register` functions of
transformers take classes, which need torch: `import kimivl_lab` and the command line's `--help` would wait for it. But
transformers finds its own models by tables of names, which are read when a model of that type is asked for.
`enter_names` writes such lines: at once into the tables that are there, into the others once they exist.

The classes here are taken before a class for "kimi_vl" that a later transformers may have; that one still can be
imported by its name. Code of a checkpoint (`auto_map`) is not run, by models, configurations and processors not even
with `trust_remote_code=True`: transformers prefers classes from outside its package that are entered. The exception is
`AutoTokenizer` called alone with `trust_remote_code=True`, which runs the code as it was asked to; `KimiVLProcessor`
takes its tokenizer's class directly.

Test: tests/test_kimi_vl_checkpoint.py.
"""

import sys
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

MODEL_TYPE = "kimi_vl"
_ALIAS = "kimivl_lab"  # transformers.models.<alias> is this package, whose names are imported at their first use
_LINES: dict[str, Any] = {
    "SPECIAL_MODEL_TYPE_TO_MODULE_NAME": _ALIAS,
    "CONFIG_MAPPING_NAMES": "KimiVLConfig",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES": "KimiVLForConditionalGeneration",
    "PROCESSOR_MAPPING_NAMES": "KimiVLProcessor",
    "IMAGE_PROCESSOR_MAPPING_NAMES": {"pil": "KimiVLImageProcessor"},
    "TOKENIZER_MAPPING_NAMES": "TikTokenTokenizer",
}
_AUTO = "transformers.models.auto"
_MODULES = {
    f"{_AUTO}.{name}"
    for name in (
        *("auto_mappings", "configuration_auto", "modeling_auto"),
        *("processing_auto", "image_processing_auto", "tokenization_auto"),
    )
}


def enter_names(package: ModuleType) -> None:
    """Makes `package` the place of the model type "kimi_vl" in transformers. Called once, when it is imported."""
    sys.modules[f"transformers.models.{_ALIAS}"] = package
    for name in _MODULES:
        if (module := sys.modules.get(name)) is not None:
            _write_lines(module)
    sys.meta_path.insert(0, _AfterImport())


class _AfterImport:
    """Finds the modules that hold the tables, as Python does, and writes the lines when one has been executed."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        if name not in _MODULES:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_then_write(module: ModuleType) -> None:
            execute(module)
            _write_lines(module)

        spec.loader.exec_module = execute_then_write
        return spec


def _write_lines(module: ModuleType) -> None:
    for table, value in _LINES.items():
        if hasattr(module, table):
            getattr(module, table)[MODEL_TYPE] = value
    for mapping in list(vars(module).values()):
        if isinstance(types := getattr(mapping, "_reverse_config_mapping", None), dict):
            types[_LINES["CONFIG_MAPPING_NAMES"]] = MODEL_TYPE
