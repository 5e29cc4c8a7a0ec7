"""The vision half of Kimi-VL: tower and projector, under the published checkpoint's names.

Test: tests/test_kimi_vl.py, tests/test_parallel_ranks.py.
"""

from collections.abc import Sequence
from typing import Any, Self

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
from ..parallel.calls import same_call
from ..parallel.cost_model import CostModel
from ..parallel.data_parallel import run_dp_sharded_vision_model
from ..parallel.groups import SharedGroup, check_group
from ..parallel.tensor_parallel import CutTower, tensor_parallel

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
        self._group = SharedGroup()
        self._auto: AutoParallelTower | None = None
        self.post_init()

    def set_encoder_parallel(
        self, encoder_parallel: str, group: dist.ProcessGroup | None = None, cost_model: CostModel | None = None
    ) -> Self:
        """Chooses how ranks share the tower's work. The projector runs on every rank, on one packed tensor.

        The tower and the projector may be replaced afterwards: each call takes those that the encoder then has. A deep
        copy shares the group. An encoder that was pickled comes back in mode "none". A tower that was cut ("tensor")
        is neither saved nor pickled.

        Args:
            encoder_parallel: "none"; "data", images shared out (the engines' `mm_enable_dp_encoder`); "tensor", layers
                cut over the ranks, for good; or "auto", data or tensor by the batch, from one copy of the weights.
            group: the ranks, unless "none". All of them make this call, and every `get_image_features`, alike.
            cost_model: what "auto" chooses by; see `AutoParallelTower`.

        Raises:
            ValueError: an unknown mode, no group, a tower that the ranks cannot share or that is cut already.
            RankError: a rank chooses another mode, or none within the group's timeout.
        """
        if encoder_parallel not in ENCODER_PARALLEL:
            raise ValueError(f"unknown encoder_parallel {encoder_parallel!r}: one of {', '.join(ENCODER_PARALLEL)}")
        if isinstance(self.vision_tower, CutTower):
            raise ValueError("the tower is cut over ranks already: load it anew")
        auto = None
        if encoder_parallel != "none":
            with same_call(check_group(group)) as call:
                layers, width = self.config.vision_config.num_hidden_layers, self.config.vision_config.hidden_size
                call.about = f"set_encoder_parallel({encoder_parallel!r}) of {layers} layers of {width}, {self.dtype}"
                if encoder_parallel == "tensor":
                    tensor_parallel(self.vision_tower, check_group(group))
            if encoder_parallel == "auto":
                auto = AutoParallelTower(self.vision_tower, check_group(group), cost_model)
        self.encoder_parallel, self._group, self._auto = encoder_parallel, SharedGroup(group), auto
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
        if self.encoder_parallel in ("none", "tensor"):
            features = self.vision_tower(pixel_values, image_grid_hws, encoder_metadata=encoder_metadata)  # (T, 4, D)
        elif image_grid_hws is None or encoder_metadata is not None:
            raise ValueError(f"encoder_parallel={self.encoder_parallel!r} takes image_grid_hws, not encoder_metadata")
        else:
            features = self._encode_on_ranks(pixel_values, image_grid_hws)
        # On every rank: at the published width it has 2 % of the tower's FLOPs, and behind the collective it works
        # alike for every mode, tower and graph runner.
        return self.multi_modal_projector(features)

    forward = get_image_features

    def _encode_on_ranks(self, pixel_values: Tensor, image_grid_hws: Sequence[Grid] | Tensor) -> Tensor:
        if self._auto is None:
            return run_dp_sharded_vision_model(self.vision_tower, pixel_values, image_grid_hws, self._group.get())
        self._auto.tower = self.vision_tower
        return self._auto(pixel_values, image_grid_hws)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """As transformers' `save_pretrained`; ValueError if the tower is cut over ranks."""
        if isinstance(self.vision_tower, CutTower):
            self.vision_tower.save_pretrained()
        super().save_pretrained(*args, **kwargs)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._group.group is None:  # from a pickle, or a copy of an encoder without a group
            self.encoder_parallel, self._auto = "none", None
