"""Tensor parallel: every rank encodes all images, with its share of the heads and of the MLP's columns.

In a block wqkv is cut by heads and wo by rows, fc0 by columns and fc1 by rows: two all-reduces a block, 54 a forward at
full size, each of all L x D activations. Norms, residuals, patch embedding, position table and merge run in full on
every rank.

Test: tests/test_parallel_ranks.py, tests/test_parallel_calls.py. Record: parallel__*.csv (variant "tensor").
"""

import copy
from collections.abc import Sequence
from typing import Any, NoReturn, Self, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from ..config import MoonViTConfig
from ..geometry import Grid, as_grid_list, patch_counts
from ..moonvit.layers import MoonVitEncoderLayer
from ..moonvit.metadata import EncoderMetadata
from ..moonvit.model import MoonVitPretrainedModel
from .calls import describe_images, same_call
from .groups import SharedGroup, check_group
from .linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear, check_plain

Module = TypeVar("Module", bound=nn.Module)


class CutTower(MoonVitPretrainedModel):
    """A tower after `tensor_parallel`: called as before, on all ranks of a group, each with a part of the weights.

    `copy.deepcopy` works and shares the group. Saving is refused: a file would hold one rank's part under names that
    nothing loads.
    """

    _group: SharedGroup

    def forward(
        self,
        pixel_values: Tensor,
        image_grid_hws: Sequence[Grid] | Tensor | None = None,
        *,
        encoder_metadata: EncoderMetadata | None = None,
    ) -> Tensor:
        """As the whole tower; RankError before any layer runs if a rank is at another call."""
        group = self._group.get()
        if group.size() > 1:
            with same_call(group) as call:
                given = encoder_metadata.grid_hws if encoder_metadata is not None else image_grid_hws
                grids = as_grid_list(given if given is not None else ())
                if grids:
                    self.check_pixels(pixel_values, sum(patch_counts(grids)))
                # metadata without grids belong to a capture, in which pixels cannot be read
                call.about = describe_images("tensor", grids, self.dtype, pixel_values if grids else None)
        return super().forward(pixel_values, image_grid_hws, encoder_metadata=encoder_metadata)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused with a ValueError."""
        raise ValueError(_NOT_SAVED)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ValueError(_NOT_SAVED)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin


_NOT_SAVED = "this tower is cut over ranks and holds one rank's part of the weights: save it before it is cut"


def tensor_parallel(
    tower: MoonVitPretrainedModel, group: dist.ProcessGroup, *, view: bool = False
) -> MoonVitPretrainedModel:
    """The tower whose blocks compute this rank's share; call it as any tower, on all ranks with the same arguments.

    Args:
        tower: whole, as `from_pretrained` loads the published checkpoint.
        group: the ranks to cut over.
        view: False cuts `tower` itself, layer by layer, freeing each full weight: on the host, then `.to(device)`, the
            device never holds more than the share. True leaves `tower` whole and returns a twin that views its
            weights, so that a change of them is seen.

    Returns:
        A `CutTower`: `tower` itself, which changes its class, or the twin.

    Raises:
        ValueError: heads or MLP columns that do not divide by the ranks, or a layer that is not a plain linear one.
    """
    check_group(group)
    check_tensor_parallel_size(tower.config, group.size())
    check_layers(tower)
    if view:
        tower = _twin(tower)
        tower.encoder = _twin(tower.encoder)
        tower.encoder.blocks = nn.ModuleList(map(_twin, tower.encoder.blocks))
        for block in _blocks(tower):
            block.mlp = _twin(block.mlp)
    for block in _blocks(tower):
        _cut_block(block, group, view)
    tower.__class__ = type(f"Cut{type(tower).__name__}", (CutTower, type(tower)), {})  # a subclass stays one
    assert isinstance(tower, CutTower)
    tower._group = SharedGroup(group)
    return tower


def check_layers(tower: MoonVitPretrainedModel) -> None:
    """ValueError unless every layer of `tower` that is cut is a plain linear one, without hooks or wrappers."""
    for block in _blocks(tower):
        for full in (block.wqkv, block.wo, block.mlp.fc0, block.mlp.fc1):
            check_plain(full)


def tensor_parallel_sizes(config: MoonViTConfig) -> list[int]:
    """World sizes that this tower can be cut over: they divide its heads and its MLP's columns."""
    heads, columns = config.num_attention_heads, config.intermediate_size
    return [size for size in range(1, heads + 1) if heads % size == 0 and columns % size == 0]


def check_tensor_parallel_size(config: MoonViTConfig, ranks: int) -> None:
    """ValueError, naming the sizes that can, if `ranks` ranks cannot share the tower."""
    legal = tensor_parallel_sizes(config)
    if ranks not in legal:
        raise ValueError(
            f"{config.num_attention_heads} heads and {config.intermediate_size} MLP columns do not divide by {ranks} "
            f"ranks: legal sizes are {', '.join(map(str, legal))}"
        )


def _blocks(tower: MoonVitPretrainedModel) -> list[MoonVitEncoderLayer]:
    return [block for block in tower.encoder.blocks if isinstance(block, MoonVitEncoderLayer)]


def _cut_block(block: MoonVitEncoderLayer, group: dist.ProcessGroup, view: bool) -> None:
    mlp = block.mlp
    qkv = QKVParallelLinear.from_linear(block.wqkv, block.num_heads, group, view=view)
    block.add_module("wqkv", qkv)
    block.add_module("wo", RowParallelLinear.from_linear(block.wo, group, view=view))
    mlp.add_module("fc0", ColumnParallelLinear.from_linear(mlp.fc0, group, view=view))
    mlp.add_module("fc1", RowParallelLinear.from_linear(mlp.fc1, group, view=view))
    block.num_heads //= group.size()


def _twin(module: Module) -> Module:
    """Another module with the same children and parameters, whose children can be replaced."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin
