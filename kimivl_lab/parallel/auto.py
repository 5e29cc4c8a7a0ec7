"""Data or tensor parallel, batch by batch, from one copy of the weights.

One large image leaves all ranks but one idle under data parallel; many images pay two all-reduces a layer under tensor
parallel for nothing. The cost model predicts both from the images' sizes. Every rank holds rank 0's cost model and the
same host integers, so all choose alike without a message.

Test: tests/test_parallel_ranks.py. Record: parallel__*.csv (variant "auto").
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..geometry import GridLike, as_grid_list, patch_counts
from ..moonvit.model import MoonVitPretrainedModel
from .balance import balance_by_cost
from .calls import rank_errors
from .cost_model import CostModel, assumed_cost_model
from .data_parallel import VisionTower, run_dp_sharded_vision_model
from .groups import SharedGroup, check_group
from .tensor_parallel import check_layers, tensor_parallel, tensor_parallel_sizes


class AutoParallelTower:
    """Calls `tower` on some images, or a twin that views its weights on all; made and called on all ranks of `group`.

    The tower, its layers and its config may be replaced between calls, alike on all ranks. A deep copy shares the
    group; what comes from a pickle has none and cannot be called.

    Args:
        tower: whole, with the same weights on every rank.
        cost_model: fitted on this machine; by default one of assumed rates. Rank 0's is taken on every rank.
    """

    def __init__(
        self, tower: MoonVitPretrainedModel, group: dist.ProcessGroup, cost_model: CostModel | None = None
    ) -> None:
        check_group(group)
        model = [cost_model or assumed_cost_model(tower.config, tower.dtype, tower.device)]
        # NCCL sends from a device, and without a name it takes the current one, which need not be the tower's
        device = tower.device if dist.get_backend(group) == "nccl" else torch.device("cpu")
        with rank_errors(group, "broadcast of the cost model"):
            dist.broadcast_object_list(model, group=group, group_src=0, device=device)
        self.tower = tower
        self.cost_model = model[0]
        self._group = SharedGroup(group)
        self.last_choice: str | None = None  # of the last call
        self._cut: _Twin | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        return self._group.get()

    def choose(self, grid_hws: Sequence[GridLike] | Tensor) -> str:
        """ "data" or "tensor", the same on every rank."""
        ranks = self.group.size()
        if ranks not in tensor_parallel_sizes(self.tower.config):
            return "data"
        return self.cost_model.choose(patch_counts(as_grid_list(grid_hws)), ranks)

    def __call__(
        self, pixel_values: Tensor, grid_hws: Sequence[GridLike] | Tensor, runner: VisionTower | None = None
    ) -> Tensor:
        """(L, 3, 14, 14) of all images and (n, 2) grids -> (T, 4, D) in the order of the images, on every rank.

        `runner` encodes this rank's images under data, in place of the tower whose graphs it holds.
        """
        try:
            mode = self.choose(grid_hws)
        except ValueError:
            mode = "data"  # raises the same inside the call, where the other ranks learn of it
        self.last_choice = mode
        if mode == "tensor":
            if self._cut is None or not self._cut.is_of(self.tower):
                self._cut = _Twin(self.tower, self.group)
            check_layers(self.tower)  # a hook that was added since would be skipped by the twin's own layers
            return self._cut.tower(pixel_values, grid_hws)
        balance = partial(balance_by_cost, cost=self.cost_model.image_cost)
        return run_dp_sharded_vision_model(runner or self.tower, pixel_values, grid_hws, self.group, balance=balance)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_cut": None}  # a copy makes its twin when it needs one


class _Twin:
    """A cut tower that views the weights of `whole`, and what `whole` was made of when it was cut."""

    def __init__(self, whole: MoonVitPretrainedModel, group: dist.ProcessGroup) -> None:
        self.whole = whole
        self.children = _children(whole)
        self.tower = tensor_parallel(whole, group, view=True)

    def is_of(self, tower: MoonVitPretrainedModel) -> bool:
        """Whether `tower` still has the modules that were cut. Options and config are taken over."""
        if tower is not self.whole or self.children != _children(tower):
            return False
        self.tower.options, self.tower.config = tower.options, tower.config
        return True


def _children(tower: MoonVitPretrainedModel) -> list[dict[str, nn.Module | None]]:
    """The children of every module that the twin copies: the tower, its encoder, the blocks and their MLPs."""
    blocks = tower.encoder.blocks
    parts = [tower, tower.encoder, blocks, *blocks, *(getattr(block, "mlp", None) for block in blocks)]
    return [dict(part._modules) for part in parts if isinstance(part, nn.Module)]
