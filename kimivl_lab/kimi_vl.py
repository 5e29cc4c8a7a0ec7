"""The vision half of Kimi-VL: tower and projector, under the published checkpoint's names."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from .config import EncoderOptions, KimiVLConfig
from .geometry import Grid
from .moonvit.checkpoint import StrictPreTrainedModel
from .moonvit.metadata import EncoderMetadata
from .moonvit.model import MoonVitPretrainedModel


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


class KimiVLEncoder(StrictPreTrainedModel):
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
        self.post_init()

    def get_image_features(
        self,
        pixel_values: Tensor,
        image_grid_hws: Sequence[Grid] | Tensor | None = None,
        *,
        encoder_metadata: EncoderMetadata | None = None,
    ) -> Tensor:
        """(L, 3, 14, 14) patches and (n, 2) grids -> (T, text hidden size), T = L / 4, in the order of the images.

        Arguments and errors are the tower's.
        """
        features = self.vision_tower(pixel_values, image_grid_hws, encoder_metadata=encoder_metadata)  # (T, 4, D)
        return self.multi_modal_projector(features)

    forward = get_image_features
