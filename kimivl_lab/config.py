"""Configurations that read the published Kimi-VL `config.json` unchanged, and the switches of the encoder.

`MoonViTConfig` and `KimiVLConfig` say WHAT is computed and are saved with a checkpoint; `EncoderOptions` says HOW,
gives the same values whatever it holds, and is never saved.

A key that asks for mathematics which the library does not have is a ValueError. Unknown keys that are in no table here
are kept and have no effect, as in transformers.

Test: tests/test_checkpoint.py, tests/test_faults_checkpoints.py.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.deepseek_v3 import DeepseekV3Config

from .checks import as_positive, as_positive_pair
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

# More than any model has: a damaged config.json must not fill the memory before its tensors are compared.
_LARGEST_SIZE, _MOST_LAYERS, _MOST_EXPERTS = 65_536, 1_000, 10_000

# Keys that other vision towers and their configurations use, with the values that mean what MoonViT computes.
_VISION_MATHEMATICS: dict[str, tuple[Any, ...]] = {
    "model_type": ("moonvit",),
    "hidden_act": ("gelu_pytorch_tanh",),
    "activation_func": ("gelu_pytorch_tanh", "PytorchGELUTanh"),
    "norm_type": ("layernorm", "layer_norm", "LayerNorm"),
    "interpolation_mode": ("bicubic",),
    "antialias": (False,),
    "rope_theta": (10000,),
    "rope_scaling": (None,),
    "rope_parameters": (None, {"rope_theta": 10000}, {"rope_theta": 10000, "rope_type": "default"}),
    "partial_rotary_factor": (1,),
    **dict.fromkeys(("num_channels", "in_channels", "in_chans", "in_dim"), (3,)),
    **dict.fromkeys(("attention_bias", "attn_bias", "qkv_bias", "mlp_bias", "use_bias"), (True,)),
    **dict.fromkeys(("dropout", "attention_dropout", "hidden_dropout", "drop_path_rate"), (0, None)),
    **dict.fromkeys(("qk_norm", "use_qk_norm", "use_cls_token", "layer_scale_init_value"), (False, None)),
    **dict.fromkeys(("video_attn_type", "merge_type", "temporal_patch_size"), (None, 1)),
    "pos_emb_type": ("learnable",),
    "pos_emb_time": (None, 1),
}
_DTYPES = ("float64", "float32", "float16", "bfloat16")
_KIMI_VL_MATHEMATICS: dict[str, tuple[Any, ...]] = {
    "model_type": ("kimi_vl",),
    "projector_hidden_act": ("gelu",),
    "projector_ln_eps": (1e-5,),
    "multimodal_projector_bias": (True,),
    "tie_word_embeddings": (False,),
}
# What the language model computes, under keys that transformers' deepseek_v3 mostly does not read.
_TEXT_MATHEMATICS: dict[str, tuple[Any, ...]] = {
    "topk_method": ("noaux_tc",),
    "scoring_func": ("sigmoid",),
    "moe_layer_freq": (1,),
    "tie_word_embeddings": (False,),
}


def published_config(name: str = "config.json") -> dict[str, Any]:
    """A published JSON file of Kimi-VL-A3B-Instruct, unchanged: `config.json` or `preprocessor_config.json`."""
    return json.loads(files("kimivl_lab.published").joinpath(name).read_text(encoding="utf-8"))


class MoonViTConfig(PreTrainedConfig):
    """The vision tower, under the published `vision_config`'s keys.

    `layer_norm_eps` is not in the published file; it is a field because a checkpoint may ask for another one.

    Raises:
        ValueError: sizes that are not positive integers or do not fit each other, or a key that asks for other
            mathematics than MoonViT's, `attn_implementation` included: see `EncoderOptions.attention` for it.
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
        derived = {key: kwargs.pop(key) for key in ("head_dim", "num_key_value_heads") if key in kwargs}
        _refuse_other_values(kwargs, _VISION_MATHEMATICS, "MoonViT")
        _refuse_other_dtypes({**kwargs, "dtype": self.dtype})
        refuse_attn_implementation(kwargs.get("attn_implementation"))
        super().__post_init__(**kwargs)
        self.check()
        own = {"head_dim": (self.head_dim, None), "num_key_value_heads": (self.num_attention_heads, None)}
        _refuse_other_values(derived, own, "a tower of these sizes")

    def check(self) -> None:
        """ValueError for sizes or keys that the tower cannot compute. The tower calls it again when it is made."""
        sizes = ("patch_size", "intermediate_size", "hidden_size", "num_attention_heads")
        for name in (*sizes, "init_pos_emb_height", "init_pos_emb_width"):
            as_positive(name, getattr(self, name), most=_LARGEST_SIZE)
        as_positive("num_hidden_layers", self.num_hidden_layers, most=_MOST_LAYERS)
        self.merge_kernel_size = as_positive_pair("merge_kernel_size", self.merge_kernel_size)
        if self.hidden_size % self.num_attention_heads or self.head_dim % 4:
            raise ValueError(
                f"hidden_size {self.hidden_size} over {self.num_attention_heads} heads must give a head size that is a "
                f"whole multiple of 4 (RoPE-2D pairs channels for two axes)"
            )
        _refuse_other_values(vars(self), _VISION_MATHEMATICS, "MoonViT")

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
    text_config: DeepseekV3Config = field(default_factory=lambda: DeepseekV3Config(**published_config()["text_config"]))
    ignore_index: int = -100
    media_placeholder_token_id: int = 163605
    pad_token_id: int | None = 163839
    vocab_size: int = 163840
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        _refuse_other_values({**kwargs, **vars(self)}, _KIMI_VL_MATHEMATICS, "Kimi-VL")
        _refuse_other_dtypes({**kwargs, "dtype": self.dtype})
        for key, config_class in type(self).sub_configs.items():
            value = getattr(self, key)
            if value is None or isinstance(value, Mapping):
                _refuse_other_dtypes(value or {})
                asked = (value or {}).get("model_type", config_class.model_type)
                value = value if asked != config_class.model_type else config_class(**(value or {}))
            if not isinstance(value, config_class):
                raise ValueError(f"{key} must be a {config_class.model_type} configuration, got {value!r:.200}")
            setattr(self, key, value)
        text = self.text_config
        _refuse_other_values(vars(text), _TEXT_MATHEMATICS, "the language model")
        as_positive("num_hidden_layers of the text_config", text.num_hidden_layers, most=_MOST_LAYERS)
        as_positive("n_routed_experts of the text_config", text.n_routed_experts, most=_MOST_EXPERTS)
        _refuse_other_values(vars(text), {"head_dim": (text.qk_rope_head_dim,)}, "the rope of the language model")
        if text.pad_token_id is not None and not -text.vocab_size <= text.pad_token_id < text.vocab_size:
            raise ValueError(f"pad_token_id {text.pad_token_id} is past the text_config's vocabulary {text.vocab_size}")
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
    position_cache_bytes: most bytes that position "cached" keeps; 0: none.
    compute: the dtype between the layers of a bfloat16 or float16 tower on a CPU. "weights": the weights' own.
        "float32": weights are raised when they are packed, which takes 4 bytes a weight instead of 2, and the result is
        rounded at the end. "auto": float32 where products in the weights' dtype are slower, by a short measurement. A
        layer with a hook or an adapter, a replaced layer, or a wanted gradient: the weights' own.
    weights: "checked" (before each forward on a CPU the weights are compared with those that were packed, so that no
        change is missed) or "announced" (no comparison and no memory for it; a change that torch does not count must
        be announced by `tower.weights_changed()`). See `kimivl_lab.kernels.weight_state`.
    """

    attention: str = "auto"
    position: str = "cached"
    rope: str = "auto"
    linear: str = "auto"
    compile: bool = False
    compute: str = "auto"
    weights: str = "checked"
    position_cache_bytes: int = 256 * 2**20


def refuse_attn_implementation(name: Any) -> None:
    """ValueError unless `name` is None: transformers' switch does not reach the encoder's attention."""
    if name is not None:
        raise ValueError(
            f"attn_implementation={name!r}: the encoder's attention is chosen by options=EncoderOptions(attention=...) "
            f"or tower.set_options(attention=...)"
        )


def _refuse_other_values(values: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]], owner: str) -> None:
    """ValueError naming the first key of `values` whose value is not one of those in `allowed`."""
    for key, possible in allowed.items():
        if key in values and values[key] not in possible:
            wanted = " or ".join(map(repr, possible))
            raise ValueError(f"{key}={values[key]!r:.200}: {owner} computes with {wanted} only")


def _refuse_other_dtypes(values: Mapping[str, Any]) -> None:
    for key in ("dtype", "torch_dtype"):
        if isinstance(name := values.get(key), str) and name not in _DTYPES:
            raise ValueError(f"{key}={name!r:.200}: one of {', '.join(_DTYPES)}")


def _preset(table: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    if name not in table:
        raise ValueError(f"unknown preset {name!r}: one of {', '.join(table)}")
    return table[name]
