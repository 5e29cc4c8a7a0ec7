"""Configurations that read the published Kimi-VL `config.json` unchanged, and the switches of the encoder.

`MoonViTConfig` and `KimiVLConfig` say WHAT is computed and are saved with a checkpoint; `EncoderOptions` says HOW,
gives the same values whatever it holds, and is never saved.
"""

import json
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.deepseek_v3 import DeepseekV3Config

from .geometry import MERGE_KERNEL_SIZE, PATCH_SIZE

# Small presets keep the published head size (72) and the ratio of the MLP; their heads split over 1, 2 or 4 ranks.
_VISION_PRESETS: dict[str, dict[str, Any]] = {
    "kimi-vl-a3b": {},
    "lab": {"hidden_size": 288, "num_attention_heads": 4, "num_hidden_layers": 6, "intermediate_size": 1076},
    "tiny": {"hidden_size": 288, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 576},
}
_TEXT_PRESETS: dict[str, dict[str, Any]] = {
    "lab": {"hidden_size": 512, "num_hidden_layers": 4, "intermediate_size": 1024, "moe_intermediate_size": 256},
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "moe_intermediate_size": 32},
}
PRESETS = tuple(_VISION_PRESETS)


def published_config(name: str = "config.json") -> dict[str, Any]:
    """A published JSON file of Kimi-VL-A3B-Instruct, unchanged: `config.json` or `preprocessor_config.json`."""
    return json.loads(files("kimivl_lab.published").joinpath(name).read_text())


class MoonViTConfig(PreTrainedConfig):
    """The vision tower, under the published `vision_config`'s keys.

    `hidden_act` and `layer_norm_eps` are not in the published file; they are fields so that a checkpoint which asks
    for other mathematics is refused or obeyed, never silently computed with ours.
    """

    model_type = "moonvit"
    base_config_key = "vision_config"

    patch_size: int = PATCH_SIZE
    num_attention_heads: int = 16
    num_hidden_layers: int = 27
    hidden_size: int = 1152
    intermediate_size: int = 4304
    init_pos_emb_height: int = 64
    init_pos_emb_width: int = 64
    merge_kernel_size: tuple[int, int] = MERGE_KERNEL_SIZE
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.merge_kernel_size = (int(self.merge_kernel_size[0]), int(self.merge_kernel_size[1]))
        if self.hidden_size % self.num_attention_heads or self.head_dim % 4:
            raise ValueError(
                f"hidden_size {self.hidden_size} over {self.num_attention_heads} heads must give a head size that is a "
                f"whole multiple of 4 (RoPE-2D pairs channels for two axes)"
            )
        if self.hidden_act != "gelu_pytorch_tanh":
            raise ValueError(f"hidden_act must be 'gelu_pytorch_tanh', MoonViT's, got {self.hidden_act!r}")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def patch_dim(self) -> int:
        """Numbers in one flattened patch: 3 * 14 * 14 = 588."""
        return 3 * self.patch_size * self.patch_size

    @property
    def merge_size(self) -> int:
        """Patches in one merged token: 4."""
        return self.merge_kernel_size[0] * self.merge_kernel_size[1]

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> "MoonViTConfig":
        """ "kimi-vl-a3b" (the published tower), "lab" (a photograph in a fraction of a second on a laptop), "tiny"."""
        return cls(**{**_preset(_VISION_PRESETS, name), **overrides})


class KimiVLConfig(PreTrainedConfig):
    """Kimi-VL: vision tower, projector and DeepSeek-V3 language model, as in the published `config.json`."""

    model_type = "kimi_vl"
    sub_configs = {"vision_config": MoonViTConfig, "text_config": DeepseekV3Config}

    vision_config: MoonViTConfig = field(default_factory=MoonViTConfig)
    text_config: DeepseekV3Config = field(default_factory=DeepseekV3Config)
    ignore_index: int = -100
    media_placeholder_token_id: int = 163605
    pad_token_id: int | None = 163839
    vocab_size: int = 163840
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        for key, config_class in type(self).sub_configs.items():
            value = getattr(self, key)
            if not isinstance(value, PreTrainedConfig):
                setattr(self, key, config_class(**(value or {})))
        super().__post_init__(**kwargs)

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> "KimiVLConfig":
        """The published configuration, or its "lab" and "tiny" reductions."""
        config = published_config()
        config["vision_config"].update(_preset(_VISION_PRESETS, name))
        if name in _TEXT_PRESETS:
            config["text_config"].update(_TEXT_PRESETS[name])
            config["torch_dtype"] = config["text_config"]["torch_dtype"] = "float32"
            config["vision_config"]["torch_dtype"] = "float32"
        return cls(**{**config, **overrides})


@dataclass(frozen=True)
class EncoderOptions:
    """Switches that change how the tower computes, never what.

    attention: a name in `kimivl_lab.moonvit.attention.ATTENTION_BACKENDS`, or "auto": the first that this device runs.
    position: "interpolate" (the reference), "gather", "separable", "adaptive" or "cached"; see
        `kimivl_lab.moonvit.position`.
    rope: "complex" (the reference), "real", "compiled", "in_place", "amx" or "auto"; see `kimivl_lab.kernels.rotation`.
    linear: "plain" (the reference), "prepacked" (a second copy of the weights in the CPU library's layout, activation
        and residual fused), "amx" (the same by our own kernel, bfloat16) or "auto"; see
        `kimivl_lab.kernels.packed_linear`.
    compile: run the blocks through torch.compile, which fuses norms, rope, activations and residuals: one graph for
        all blocks and batches. `rope` and `linear` are then the compiler's.
    weights: "checked" (before each forward on a CPU the weights are compared with those that were packed, so that no
        change is missed) or "announced" (no comparison and no memory for it; a change that torch does not count must
        be announced by `tower.weights_changed()`). See `kimivl_lab.kernels.weight_state`.
    """

    attention: str = "auto"
    position: str = "cached"
    rope: str = "auto"
    linear: str = "auto"
    compile: bool = False
    weights: str = "checked"


def _preset(table: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    if name not in table:
        raise ValueError(f"unknown preset {name!r}: one of {', '.join(table)}")
    return table[name]
