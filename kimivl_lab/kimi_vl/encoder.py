"""The vision half of Kimi-VL: tower and projector, under the published checkpoint's names."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Self

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import EncoderOptions, KimiVLConfig
from ..geometry import Grid
from ..graphs.inputs import SupportsEncoderCudaGraph
from ..moonvit.checkpoint import StrictPreTrainedModel
from ..moonvit.metadata import EncoderMetadata
from ..moonvit.model import MoonVitPretrainedModel
from ..parallel.auto import AutoParallelTower
from ..parallel.cost_model import CostModel
from ..parallel.data_parallel import run_dp_sharded_vision_model
from ..parallel.groups import check_group
from ..parallel.tensor_parallel import tensor_parallel

ENCODER_PARALLEL = ("none", "data", "tensor", "auto")


class KimiVLMultiModalProjector(nn.Module):
    """LayerNorm on each patch, the 4 patches of a token side by side, linear, exact (erf) GELU, linear."""

    def __init__(self, config: KimiVLConfig) -> None:
        super().__init__()
        vision, text = config.vision_config, config.text_config
        self.hidden_size = vision.hidden_size * vision.merge_size
        self.pre_norm = nn.LayerNorm(vision.hidden_size, eps=1e-5)
        self.linear_1 = nn.Linear(self.hidden_size, self.hidden_size)
        self.linear_2 = nn.Linear(self.hidden_size, text.hidden_size)

    def forward(self, image_features: Tensor) -> Tensor:
        """(T, 4, D) -> (T, text hidden size)."""
        x = self.pre_norm(image_features).view(-1, self.hidden_size)  # (T, 4D)
        return self.linear_2(F.gelu(self.linear_1(x)))


class KimiVLEncoder(SupportsEncoderCudaGraph, StrictPreTrainedModel):
    """Tower and projector: images in, rows for the language model out. Loads from a full Kimi-VL checkpoint."""

    config_class = KimiVLConfig
    config: KimiVLConfig
    main_input_name = "pixel_values"
    input_modalities = ["image"]
    _no_split_modules = ["MoonVitEncoderLayer"]
    _checkpoint_renames = {r"^model\.(vision_tower|multi_modal_projector)\.": r"\1."}
    _checkpoint_ignores = r"^(model\.)?(language_model|lm_head)\."

    def __init__(self, config: KimiVLConfig, options: EncoderOptions | None = None) -> None:
        super().__init__(config)
        self.vision_tower = MoonVitPretrainedModel(config.vision_config, options)
        self.multi_modal_projector = KimiVLMultiModalProjector(config)
        self.out_hidden_size = config.text_config.hidden_size
        self.encoder_parallel = "none"
        self._share: Callable[[Tensor, Sequence[Grid] | Tensor], Tensor] | None = None
        self.post_init()

    def set_encoder_parallel(
        self, encoder_parallel: str, group: dist.ProcessGroup | None = None, cost_model: CostModel | None = None
    ) -> Self:
        """Chooses how ranks share the tower's work; the projector runs on every rank, on one packed tensor.

        Args:
            encoder_parallel: "none"; "data", images shared out (the engines' `mm_enable_dp_encoder`); "tensor", layers
                cut over the ranks, for good; or "auto", data or tensor by the batch, from one copy of the weights.
            group: the ranks, unless "none". All of them make this call, and every `get_image_features`, alike.
            cost_model: what "auto" chooses by; see `AutoParallelTower`.

        Raises:
            ValueError: an unknown mode, no group, a tower that the ranks cannot share or that is cut already.
        """
        if encoder_parallel not in ENCODER_PARALLEL:
            raise ValueError(f"unknown encoder_parallel {encoder_parallel!r}: one of {', '.join(ENCODER_PARALLEL)}")
        if self.encoder_parallel == "tensor":
            raise ValueError("the tower is cut over ranks already: load it anew")
        share = None
        if encoder_parallel == "data":
            share = partial(run_dp_sharded_vision_model, self.vision_tower, group=check_group(group))
        elif encoder_parallel == "tensor":
            tensor_parallel(self.vision_tower, check_group(group))
        elif encoder_parallel == "auto":
            share = AutoParallelTower(self.vision_tower, check_group(group), cost_model)
        self.encoder_parallel, self._share = encoder_parallel, share
        return self

    def get_image_features(
        self,
        pixel_values: Tensor,
        image_grid_hws: Sequence[Grid] | Tensor | None = None,
        *,
        encoder_metadata: EncoderMetadata | None = None,
    ) -> Tensor:
        """(L, 3, 14, 14) patches and (n, 2) grids -> (T, text hidden size), T = L / 4, in the order of the images.

        Arguments and errors are the tower's; ranks that share images build their own metadata and take none.
        """
        if self._share is None:
            features = self.vision_tower(pixel_values, image_grid_hws, encoder_metadata=encoder_metadata)  # (T, 4, D)
        elif image_grid_hws is None or encoder_metadata is not None:
            raise ValueError(f"encoder_parallel={self.encoder_parallel!r} takes image_grid_hws, not encoder_metadata")
        else:
            features = self._share(pixel_values, image_grid_hws)
        return self.multi_modal_projector(features)

    forward = get_image_features
