"""The vision tower: `pixel_values` and grids in, one packed (T, 4, D) tensor out, always.

A plain torch module; transformers' PreTrainedModel gives it initialisation, saving and loading. Parameter names are the
published checkpoint's, less their `vision_tower.` prefix.

Test: tests/test_tower.py, tests/test_parity.py, tests/test_faults_weights.py. Record: ladder__*.csv, encoder__*.csv.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from transformers import initialization as init

from ..config import EncoderOptions, MoonViTConfig
from ..geometry import Grid, GridLike
from ..kernels.dispatch import is_untouched
from ..kernels.memory import upload
from ..kernels.packed_linear import RAISED, release_packed
from .checkpoint import StrictPreTrainedModel
from .layers import MoonVitEncoder, ResolvedOptions, check_names
from .merger import patch_merger_packed
from .metadata import EncoderMetadata, prepare_encoder_metadata
from .patch_embed import MoonVisionPatchEmbed
from .position import Learnable2DInterpPosEmb
from .rope import Rope2DPosEmb


class MoonVitPretrainedModel(StrictPreTrainedModel):
    """MoonViT.

    Args:
        config: what to compute.
        options: how to compute it; any choice gives the same values.
    """

    config_class = MoonViTConfig
    config: MoonViTConfig
    main_input_name = "pixel_values"
    input_modalities = ["image"]
    supports_gradient_checkpointing = True
    _no_split_modules = ["MoonVitEncoderLayer"]
    _checkpoint_renames = {r"^(model\.)?vision_tower\.": ""}
    _checkpoint_ignores = r"^(model\.)?(language_model|multi_modal_projector|mm_projector|lm_head)\."

    def __init__(self, config: MoonViTConfig, options: EncoderOptions | None = None) -> None:
        super().__init__(config)
        config.check()  # again, because an argument of `from_pretrained` may have changed it
        self.options = options or EncoderOptions()
        check_names(self.options)
        self.patch_embed = MoonVisionPatchEmbed(config)
        self.patch_embed.pos_emb.cache.set_max_bytes(self.options.position_cache_bytes)
        self.patch_embed.pos_emb.cache.set_checked(self.options.weights != "announced")
        self.encoder = MoonVitEncoder(config)
        self.rope_2d = Rope2DPosEmb(config.head_dim)
        self._resolved = _NotCopied()
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: torch.nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Learnable2DInterpPosEmb):
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> Any:
        """What was asked for, None included. The tower computes by its options; a full model maps the name to them."""
        return requested_attention

    def set_options(self, **changes: Any) -> None:
        """Changes switches, by `EncoderOptions`' names; ValueError for an unknown one. Frees what is not used any more.

        Packed copies of the weights go when `linear` is "plain" or `compile` is on; the position cache is emptied when
        `position` is not "cached", and cut to `position_cache_bytes` when that is among the changes. Graphs that were
        captured before keep their own; see `KimiVLEncoder.set_options` for those of an encoder.
        """
        options = replace(self.options, **changes)
        check_names(options)
        if "position_cache_bytes" in changes:
            self.patch_embed.pos_emb.cache.set_max_bytes(options.position_cache_bytes)
        self.options = options
        self.patch_embed.pos_emb.cache.set_checked(options.weights != "announced")
        self._resolved.clear()
        if self.options.linear == "plain" or self.options.compile:
            release_packed(self.encoder)
        if self.options.position != "cached":
            self.patch_embed.pos_emb.cache.clear()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What `.to()` and its kin call: frees what was cached of weights that have another device or dtype now."""
        before = self.device, self.dtype
        super()._apply(fn, recurse)
        if before != (self.device, self.dtype):
            release_packed(self.encoder)
            self.patch_embed.pos_emb.cache.clear()
        return self

    def resolve_options(self) -> ResolvedOptions:
        """`options` as functions for the tower's device and dtype and the current grad mode; resolved once for each."""
        key = (self.options, self.device, self.dtype, torch.is_grad_enabled())
        if key not in self._resolved:
            self._resolved[key] = ResolvedOptions.resolve(self.options, self.device, self.dtype)
        return self._resolved[key]

    def layer_dtype(self) -> torch.dtype:
        """The dtype between the layers of the next forward: see `EncoderOptions.compute`."""
        return torch.float32 if self.encoder.settle(self.resolve_options()).linear is RAISED else self.dtype

    def prepare_encoder_metadata(
        self,
        grid_hws: Sequence[GridLike] | Tensor,
        max_images: int | None = None,
        device: torch.device | str | None = None,
    ) -> EncoderMetadata:
        """Everything grid-dependent of one forward, from host integers; see `EncoderMetadata`."""
        return prepare_encoder_metadata(
            grid_hws,
            pos_emb=self.patch_embed.pos_emb,
            rope=self.rope_2d,
            merge_kernel_size=self.config.merge_kernel_size,
            max_images=max_images,
            device=device,
            dtype=self.dtype,
            position=self.options.position,
        )

    def forward(
        self,
        pixel_values: Tensor,
        image_grid_hws: Sequence[Grid] | Tensor | None = None,
        *,
        encoder_metadata: EncoderMetadata | None = None,
    ) -> Tensor:
        """Encodes all images of a batch.

        Args:
            pixel_values: (L, 3, 14, 14), normalised floats or raw uint8; moved to the tower's device.
            image_grid_hws: (n, 2) host integers (h, w) in patches, or
            encoder_metadata: what `prepare_encoder_metadata` made of them. Exactly one of the two.

        Returns:
            (T, 4, D) packed features, T = L / 4, in the order of the images; `split_image_features` cuts them.

        Raises:
            ValueError: grids and pixels that do not add up, or not exactly one of grids and metadata.
        """
        if image_grid_hws is not None and encoder_metadata is None:
            encoder_metadata = self.prepare_encoder_metadata(image_grid_hws)
        elif image_grid_hws is not None or encoder_metadata is None:
            raise ValueError("give exactly one of image_grid_hws and encoder_metadata")
        self.check_pixels(pixel_values, encoder_metadata.num_patches)
        options = self.resolve_options()
        if type(self.encoder) is MoonVitEncoder:
            options = self.encoder.settle(options)
        embed: Callable[..., Tensor] = self.patch_embed
        if options.linear is RAISED and is_untouched(self.patch_embed, MoonVisionPatchEmbed):
            embed = partial(embed, dtype=torch.float32)
        x = embed(upload(pixel_values, self.device), encoder_metadata.pos_embeds)  # (L, D)
        x = self.encoder(x, encoder_metadata, options)  # (L, D)
        return patch_merger_packed(x, encoder_metadata.merge_gather_idx, self.config.merge_size)  # (T, 4, D)

    def check_pixels(self, pixel_values: Tensor, num_patches: int) -> None:
        """ValueError unless `pixel_values` hold `num_patches` patches, as floats or uint8."""
        side = self.config.patch_size
        if pixel_values.ndim != 4 or tuple(pixel_values.shape[1:]) != (3, side, side):
            raise ValueError(f"pixel_values must be (L, 3, {side}, {side}), got {tuple(pixel_values.shape)}")
        if not (pixel_values.is_floating_point() or pixel_values.dtype == torch.uint8):
            raise ValueError(f"pixel_values must be normalised floats or raw uint8, got {pixel_values.dtype}")
        if pixel_values.shape[0] != num_patches:
            raise ValueError(f"pixel_values hold {pixel_values.shape[0]} patches, the grids need {num_patches}")


class _NotCopied(dict[Any, ResolvedOptions]):
    """Functions cannot be pickled, and they are found again at once: copies and pickles are empty."""

    def __reduce__(self) -> tuple[type["_NotCopied"], tuple[()]]:
        return _NotCopied, ()
