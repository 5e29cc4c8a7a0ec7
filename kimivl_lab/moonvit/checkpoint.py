"""Loading that leaves no weight out and takes none from elsewhere, without a word.

transformers warns about missing and unexpected tensors. Here every expected tensor must come from exactly one tensor of
the checkpoint, every vision tensor of the checkpoint must be used, and each must lie in the file that the index names;
else loading is a ValueError that lists them. Both the published names (`vision_tower.encoder...`) and transformers'
renamed form (`model.vision_tower.encoder...`) load.

A checkpoint is `model.safetensors`, or `model.safetensors.index.json` and the files that it names. If both exist,
`model.safetensors` is loaded and the index is not read, as transformers does. Nothing else is loaded: no pickle.

Test: tests/test_checkpoint.py, tests/test_faults_checkpoints.py.
"""

import json
import logging
import os
import re
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from ..config import refuse_attn_implementation
from ..kernels.weight_state import announce_change

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
_OTHER_SOURCES = ("state_dict", "gguf_file", "variant")
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ADAPTER = "adapter_config.json"
_LISTED = 8


class StrictPreTrainedModel(PreTrainedModel):
    """A PreTrainedModel whose `from_pretrained` checks what is loaded.

    `_checkpoint_renames` maps patterns of checkpoint names to the model's; names matching `_checkpoint_ignores` belong
    to other parts of the full model and are left alone.
    """

    _checkpoint_renames: ClassVar[dict[str, str]] = {}
    _checkpoint_ignores: ClassVar[str] = r"(?!)"
    _takes_attn_implementation: ClassVar[bool] = False

    def weights_changed(self) -> None:
        """Announces that weights were changed in a way that torch does not count. Call it after such a change.

        Torch counts optimisers, `load_state_dict`, `.to()`, new tensors and every in-place operator on a parameter: for
        those nothing is to be done. It does not count writes to `parameter.data`, through numpy or by another library,
        which is how some engines load weights. On a CPU the next forward sees those too, unless
        `EncoderOptions(weights="announced")`; on a GPU call this. Packed copies, the position cache and captured
        graphs of this model are then made again at their next use.
        """
        announce_change([*self.parameters(), *self.buffers()])

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        """Refused: see `EncoderOptions.attention`."""
        refuse_attn_implementation(attn_implementation)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike | None,
        *args: Any,
        output_loading_info: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As transformers' `from_pretrained`, from safetensors only.

        Raises:
            ValueError: missing, unused, doubled or misshapen tensors; tensors outside the file that the index names; a
                file that is damaged or not there. The message names tensors and files.
        """
        if pretrained_model_name_or_path is None:
            raise ValueError("from_pretrained takes a folder or the name of a repository, got None")
        where = str(pretrained_model_name_or_path)
        for name in _OTHER_SOURCES:
            if kwargs.get(name) is not None:
                raise ValueError(f"{name}: only {SINGLE_FILE}, or {INDEX} and its files, are loaded")
        if kwargs.setdefault("use_safetensors", True) is not True:
            raise ValueError(f"use_safetensors={kwargs['use_safetensors']}: only safetensors files are loaded")
        if not cls._takes_attn_implementation:
            refuse_attn_implementation(kwargs.pop("attn_implementation", None))
        hub = {name: kwargs[name] for name in _HUB_ARGUMENTS if name in kwargs}
        files = checkpoint_files(where, **hub)
        cls._check_files(where, files)
        config = kwargs.get("config")
        if not isinstance(config, PreTrainedConfig):
            config = cls._check_config(str(config or where), hub)
        cls._check_tensors(where, files, config)
        kwargs.setdefault("key_mapping", dict(cls._checkpoint_renames))
        kwargs.setdefault("ignore_mismatched_sizes", True)  # reported below, with every other fault
        with _no_load_report():
            loaded: Any = super().from_pretrained(where, *args, output_loading_info=True, **kwargs)
        model, info = loaded
        ignored = re.compile(cls._checkpoint_ignores)
        faults = {
            "missing": info["missing_keys"],
            "unused": [name for name in info["unexpected_keys"] if not ignored.match(name)],
            "of another shape": [
                f"{name} {tuple(got)}, not {tuple(want)}" for name, got, want in info["mismatched_keys"]
            ],
        }
        refuse(where, faults)
        return (model, info) if output_loading_info else model

    @classmethod
    def _check_config(cls, where: str, hub: Mapping[str, Any]) -> Any:
        """The configuration; ValueError that names the checkpoint if it describes no model of this class."""
        config_class: Any = cls.config_class
        try:
            config = config_class.from_pretrained(where, **hub)
            dtype = getattr(config, "dtype", None)
            if dtype is not None and not isinstance(dtype, torch.dtype):
                raise ValueError(f"dtype must name one of torch, got {dtype!r}")
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{where}: config.json: {error}") from error
        return config

    @classmethod
    def _check_tensors(cls, where: str, files: Iterable[Path], config: Any) -> None:
        """ValueError that lists the tensors of `files` that this class cannot load, where that is known from headers.

        For parts of a model nothing is to be done: transformers reports all faults of theirs after the load.
        """

    @classmethod
    def _check_files(cls, where: str, files: Mapping[Path, list[str] | None]) -> None:
        """ValueError unless each of this model's tensors is stored once, and where the index says.

        Args:
            files: by file, the names that the index places in it; None where there is no index.
        """
        ignored = re.compile(cls._checkpoint_ignores)
        found: dict[str, str] = {}  # "file: name" of each tensor, by the model's name for it
        doubled, elsewhere, absent, integers = [], [], [], []
        for path, indexed in files.items():
            stored = tensor_dtypes(path)
            for name, dtype in stored.items():
                if ignored.match(name):
                    continue
                if dtype not in DTYPES:
                    integers.append(f"{name} ({dtype})")
                renamed, here = cls._renamed(name), f"{path.name}: {name}"
                if (first := found.setdefault(renamed, here)) != here:
                    doubled.append(f"{renamed} ({first} and {here})")
                elif indexed is not None and name not in indexed:
                    owner = next((other.name for other, names in files.items() if names and name in names), "no file")
                    elsewhere.append(f"{name} (in {path.name}, the index names {owner})")
            absent += [f"{name} (not in {path.name})" for name in set(indexed or ()) - set(stored)]
        faults = {
            "stored twice": doubled,
            f"of another dtype than {', '.join(DTYPES)}": integers,
            "outside the file that the index names": elsewhere,
            "not in the file that the index names": [name for name in absent if not ignored.match(name)],
        }
        refuse(where, faults)

    @classmethod
    def _renamed(cls, name: str) -> str:
        for pattern, replacement in cls._checkpoint_renames.items():
            name = re.sub(pattern, replacement, name)
        return name


def checkpoint_files(where: str, **hub: Any) -> dict[Path, list[str] | None]:
    """The files of a checkpoint, local or of a hub, as transformers chooses them (read in 5.17 and 5.24).

    Returns:
        By file, the names of the tensors that the index places in it; None for a single file.

    Raises:
        ValueError: no checkpoint there, or an index that is damaged or names a file that is not there.
    """
    if os.path.isfile(where):
        raise ValueError(f"{where} is a file: give the folder that holds {SINGLE_FILE} or {INDEX}")
    folder = Path(where, hub.get("subfolder", ""))
    if distributed := sorted(folder.glob("shard-*-model-*.safetensors")):  # transformers would load these instead
        raise ValueError(f"{folder} holds a distributed checkpoint ({distributed[0].name}): only {SINGLE_FILE} loads")
    optional = {"_raise_exceptions_for_missing_entries": False, **hub}
    if cached_file(where, _ADAPTER, **optional):  # transformers would load the adapter's own base model instead
        raise ValueError(f"{where} holds an adapter ({_ADAPTER}): load the base model, then the adapter with peft")
    if single := cached_file(where, SINGLE_FILE, **optional):
        return {Path(single): None}
    index = cached_file(where, INDEX, **optional)
    if index is None:
        raise ValueError(f"{where}: no {SINGLE_FILE} and no {INDEX}")
    file_of, found = _weight_map(Path(index)), {}
    for file in sorted(set(file_of.values())):
        path = cached_file(where, file, **optional)
        if path is None:
            raise ValueError(f"{where}: {INDEX} names {file}, which is not there")
        found[Path(path)] = [name for name, owner in file_of.items() if owner == file]
    return found


def tensor_dtypes(path: Path) -> dict[str, str]:
    """The dtype of each tensor in a safetensors file, from its header. ValueError if the file is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_slice(name).get_dtype() for name in list(file.keys())}
    except (SafetensorError, OSError) as error:
        with path.open("rb") as opened:
            start = opened.read(64)
        kind = "a git-lfs pointer, not the file itself: run `git lfs pull`" if start.startswith(b"version ") else error
        raise ValueError(f"{path}: damaged, {path.stat().st_size} bytes: {kind}") from error


def _weight_map(index: Path) -> dict[str, str]:
    try:
        document = json.loads(index.read_bytes())
        weight_map = document["weight_map"]
        if not isinstance(document["metadata"], dict):
            raise ValueError("metadata must be there, as transformers reads it")
        if not weight_map or not all(_is_file_name(file) for file in weight_map.values()):
            raise ValueError("weight_map must name a file of the same folder for each tensor")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index}: not the index of a checkpoint ({type(error).__name__}: {error})") from error
    return weight_map


def _is_file_name(file: Any) -> bool:
    return isinstance(file, str) and file.endswith(".safetensors") and Path(file).name == file


@contextmanager
def _no_load_report() -> Generator[None]:
    """Keeps transformers' report of a load out of the log: what it finds wrong is raised, and the rest is as meant."""
    log = logging.getLogger("transformers.modeling_utils")

    def is_no_report(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    log.addFilter(is_no_report)
    try:
        yield
    finally:
        log.removeFilter(is_no_report)


def refuse(where: str, faults: Mapping[str, Collection[str]]) -> None:
    """ValueError that lists the tensors of each kind of fault; nothing where there are none."""
    problems = []
    for kind, names in faults.items():
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        if names:
            problems.append(f"{len(names)} tensors {kind}: {', '.join(sorted(names)[:_LISTED])}{more}")
    if problems:
        raise ValueError(f"{where}: {'; '.join(problems)}")
