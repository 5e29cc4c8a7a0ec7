"""Loading that cannot silently leave a weight out.

transformers warns about missing and unexpected tensors; here every expected tensor must come from exactly one tensor
of the checkpoint and every vision tensor of the checkpoint must be used, else loading is a ValueError that lists them.
Both the published names (`vision_tower.encoder...`) and transformers' renamed form (`model.vision_tower.encoder...`)
load.
"""

import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from ..kernels.weight_state import announce_change

_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
_LISTED = 8


class StrictPreTrainedModel(PreTrainedModel):
    """A PreTrainedModel whose `from_pretrained` checks what was loaded.

    `_checkpoint_renames` maps patterns of checkpoint names to the model's; names matching `_checkpoint_ignores` belong
    to other parts of the full model and are left alone.
    """

    _checkpoint_renames: ClassVar[dict[str, str]] = {}
    _checkpoint_ignores: ClassVar[str] = r"(?!)"

    def weights_changed(self) -> None:
        """Announces that weights were changed in a way that torch does not count. Call it after such a change.

        Torch counts optimisers, `load_state_dict`, `.to()`, new tensors and every in-place operator on a parameter: for
        those nothing is to be done. It does not count writes to `parameter.data`, through numpy or by another library,
        which is how some engines load weights. On a CPU the next forward sees those too, unless
        `EncoderOptions(weights="announced")`; on a GPU call this. Packed copies, the position cache and captured
        graphs of this model are then made again at their next use.
        """
        announce_change([*self.parameters(), *self.buffers()])

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike | None,
        *args: Any,
        output_loading_info: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As transformers' `from_pretrained`; raises ValueError on missing, unused, doubled or misshapen tensors."""
        hub = {name: kwargs[name] for name in _HUB_ARGUMENTS if name in kwargs}
        duplicates = cls._duplicates(checkpoint_names(pretrained_model_name_or_path, **hub))
        if duplicates:
            raise ValueError(f"{pretrained_model_name_or_path}: {_listing('stored twice under two names', duplicates)}")
        kwargs.setdefault("key_mapping", dict(cls._checkpoint_renames))
        kwargs.setdefault("ignore_mismatched_sizes", True)  # reported below, with every other fault
        loaded: Any = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        model, info = loaded
        ignored = re.compile(cls._checkpoint_ignores)
        faults = {
            "missing": info["missing_keys"],
            "unused": [name for name in info["unexpected_keys"] if not ignored.match(name)],
            "of another shape": [
                f"{name} {tuple(got)}, not {tuple(want)}" for name, got, want in info["mismatched_keys"]
            ],
        }
        problems = [_listing(kind, names) for kind, names in faults.items() if names]
        if problems:
            raise ValueError(f"{pretrained_model_name_or_path}: {'; '.join(problems)}")
        return (model, info) if output_loading_info else model

    @classmethod
    def _duplicates(cls, names: list[str]) -> list[str]:
        """Model names that two tensors of the checkpoint would fill."""
        counts = Counter(cls._renamed(name) for name in names)
        return [name for name, count in counts.items() if count > 1]

    @classmethod
    def _renamed(cls, name: str) -> str:
        for pattern, replacement in cls._checkpoint_renames.items():
            name = re.sub(pattern, replacement, name)
        return name


def checkpoint_names(pretrained_model_name_or_path: str | os.PathLike | None, **hub: Any) -> list[str]:
    """Names of all tensors in a checkpoint (one safetensors file or an index of several), local or of a hub."""
    where = str(pretrained_model_name_or_path)
    optional = {"_raise_exceptions_for_missing_entries": False, **hub}
    if index := cached_file(where, "model.safetensors.index.json", **optional):
        return list(json.loads(Path(index).read_text())["weight_map"])
    if single := cached_file(where, "model.safetensors", **optional):
        with safe_open(single, framework="pt") as file:
            return list(file.keys())
    raise ValueError(f"{where}: no model.safetensors and no model.safetensors.index.json")


def _listing(kind: str, names: Any) -> str:
    names = sorted(names)
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{len(names)} tensors {kind}: {', '.join(names[:_LISTED])}{more}"
