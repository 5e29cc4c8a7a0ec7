"""Data or tensor parallel, batch by batch, from one copy of the weights.

One large image leaves all ranks but one idle under data parallel; many images pay two all-reduces a layer under tensor
parallel for nothing. The cost model predicts both from the images' sizes. Every rank holds rank 0's model and the same
host integers, so all choose alike without a message.
"""

from collections.abc import Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor

from ..geometry import Grid, as_grid_list, patch_counts
from ..moonvit.model import MoonVitPretrainedModel
from .balance import balance_by_cost
from .cost_model import CostModel
from .data_parallel import run_dp_sharded_vision_model
from .groups import check_group, naming_missing
from .rates import assumed_cost_model
from .tensor_parallel import tensor_parallel, tensor_parallel_sizes


class AutoParallelTower:
    """Calls `tower` on some images, or a twin that views its weights on all; made and called on all ranks of `group`.

    Args:
        tower: whole, with the same weights on every rank.
        cost_model: fitted on this machine; by default one of assumed rates. Rank 0's is taken on every rank.
    """

    def __init__(
        self, tower: MoonVitPretrainedModel, group: dist.ProcessGroup, cost_model: CostModel | None = None
    ) -> None:
        check_group(group)
        model = [cost_model or assumed_cost_model(tower.config, tower.dtype, tower.device)]
        with naming_missing(group, "broadcast of the cost model"):
            dist.broadcast_object_list(model, group=group, group_src=0)
        self.tower = tower
        self.group = group
        self.cost_model = model[0]
        can_cut = group.size() in tensor_parallel_sizes(tower.config)
        self._twin = tensor_parallel(tower, group, view=True) if can_cut else None

    def choose(self, grid_hws: Sequence[Grid] | Tensor) -> str:
        """ "data" or "tensor", the same on every rank."""
        return self.cost_model.choose(patch_counts(as_grid_list(grid_hws)), self.group.size())

    def __call__(self, pixel_values: Tensor, grid_hws: Sequence[Grid] | Tensor) -> Tensor:
        """(L, 3, 14, 14) of all images and (n, 2) grids -> (T, 4, D) in the order of the images, on every rank."""
        if self._twin is not None and self.choose(grid_hws) == "tensor":
            self._twin.options = self.tower.options
            return self._twin(pixel_values, grid_hws)
        balance = partial(balance_by_cost, cost=self.cost_model.image_cost)
        return run_dp_sharded_vision_model(self.tower, pixel_values, grid_hws, self.group, balance=balance)
