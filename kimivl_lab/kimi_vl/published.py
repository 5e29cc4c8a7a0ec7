"""The published form of a whole checkpoint: which tensors it holds, and how they become the model's parameters.

Only the experts differ: a file holds three matrices for each expert, the model two tensors for all experts of a layer.
transformers converts one into the other. It tells the names and shapes of the published form here, and it writes that
form on save. On load it would keep every matrix until its layer is stacked, beside the used pages of mapped files,
which count as memory of the process. Here files are read, not mapped, and each matrix is read into its place in the
stacked tensor.

Test: tests/test_kimi_vl_checkpoint.py.
"""

import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ..moonvit.checkpoint import DTYPES

_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def published_shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of the checkpoint that `model`, which may be on meta, would be saved as."""
    empty = {name: value.to("meta") for name, value in model.state_dict().items()}
    return {name: tuple(value.shape) for name, value in revert_weight_conversion(model, empty).items()}


def stored_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor in a safetensors file, from its header."""
    with safe_open(path, framework="pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in list(file.keys())}


class StackedExperts:
    """The matrices of all experts of a layer as one tensor, which is read when it is indexed, as a stored tensor is.

    Args:
        matrices: by expert, the stored matrices that lie below each other: gate and up, or down alone.
    """

    def __init__(self, matrices: list[list[Any]]) -> None:
        self._matrices = matrices

    def get_shape(self) -> list[int]:
        rows, columns = zip(*(matrix.get_shape() for matrix in self._matrices[0]), strict=True)
        return [len(self._matrices), sum(rows), columns[0]]

    def get_dtype(self) -> str:
        """The widest dtype of the matrices."""
        dtypes = {matrix.get_dtype() for parts in self._matrices for matrix in parts}
        return dtypes.pop() if len(dtypes) == 1 else "F64" if "F64" in dtypes else "F32"

    def __getitem__(self, index: Any) -> Tensor:
        stacked = torch.empty(self.get_shape(), dtype=DTYPES[self.get_dtype()], device="cpu")
        for expert, parts in enumerate(self._matrices):
            row = 0
            for matrix in parts:
                read = matrix[...]
                stacked[expert, row : row + len(read)] = read
                row += len(read)
        return stacked[index]


def open_published(paths: Iterable[str], rename: Callable[[str], str], opened: ExitStack) -> dict[str, Any]:
    """What to load, by the model's names: stored tensors, read when they are indexed while `opened` is open."""
    found: dict[str, Any] = {}
    experts: dict[str, dict[tuple[int, str], Any]] = {}
    for path in paths:
        file = opened.enter_context(safe_open(path, framework="pt", backend="pread"))
        for name in list(file.keys()):
            model_name = rename(name)
            if match := _EXPERT.fullmatch(model_name):
                layer, expert, part = match.groups()
                experts.setdefault(layer, {})[int(expert), part] = file.get_slice(name)
            else:
                found[model_name] = file.get_slice(name)
    for layer, parts in experts.items():
        count = 1 + max(expert for expert, _ in parts)
        for name, rows in {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}.items():
            found[f"{layer}.{name}"] = StackedExperts([[parts[e, row] for row in rows] for e in range(count)])
    return found
