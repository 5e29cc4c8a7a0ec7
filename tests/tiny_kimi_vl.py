"""Small whole Kimi-VL checkpoints in the published layout, written name by name from the published index.

Nothing of the library's own saving is used: what it loads is compared with what is written here.
"""

from pathlib import Path

import torch

from kimivl_lab import KimiVLConfig
from kimivl_lab.config import published_config
from tests.test_checkpoint import write_checkpoint

PLACEHOLDER, PAD, BOS, EOS, VOCABULARY = 500, 511, 509, 510, 512
_VISION = {"num_hidden_layers": 2, "hidden_size": 72, "num_attention_heads": 2, "intermediate_size": 96}
_TEXT = {
    **{"hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 96, "moe_intermediate_size": 24},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 16, "vocab_size": VOCABULARY},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "n_shared_experts": 2},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS},
}


def tiny_json(dtype: str = "float32") -> dict:
    """The published `config.json` with small sizes: one dense layer, two of experts."""
    config = published_config()
    config |= {"vocab_size": VOCABULARY, "pad_token_id": PAD, "media_placeholder_token_id": PLACEHOLDER}
    config |= {"auto_map": {"AutoConfig": "configuration_kimi_vl.KimiVLConfig"}, "torch_dtype": dtype}
    config["vision_config"] |= {**_VISION, "torch_dtype": dtype}
    config["text_config"] |= {**_TEXT, "torch_dtype": dtype}
    return config


def published_shapes(config: KimiVLConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor by its published name, in the order of the published index."""
    vision, text = config.vision_config, config.text_config
    width, merged, hidden = vision.hidden_size, 4 * vision.hidden_size, text.hidden_size
    found: dict[str, tuple[int, ...]] = {}

    def affine(name: str, out: int, *rest: int) -> None:
        found.update({f"{name}.weight": (out, *rest), f"{name}.bias": (out,)})

    affine("vision_tower.patch_embed.proj", width, 3, 14, 14)
    found["vision_tower.patch_embed.pos_emb.weight"] = (64, 64, width)
    for block in range(vision.num_hidden_layers):
        name = f"vision_tower.encoder.blocks.{block}"
        affine(f"{name}.norm0", width)
        affine(f"{name}.norm1", width)
        affine(f"{name}.wqkv", 3 * width, width)
        affine(f"{name}.wo", width, width)
        affine(f"{name}.mlp.fc0", vision.intermediate_size, width)
        affine(f"{name}.mlp.fc1", width, vision.intermediate_size)
    affine("vision_tower.encoder.final_layernorm", width)
    affine("multi_modal_projector.pre_norm", width)
    affine("multi_modal_projector.linear_1", merged, merged)
    affine("multi_modal_projector.linear_2", hidden, merged)

    def mlp(name: str, inner: int) -> None:
        found.update({f"{name}.{part}_proj.weight": (inner, hidden) for part in ("gate", "up")})
        found[f"{name}.down_proj.weight"] = (hidden, inner)

    model, heads = "language_model.model", text.num_attention_heads
    found[f"{model}.embed_tokens.weight"] = (text.vocab_size, hidden)
    for layer in range(text.num_hidden_layers):
        name, rope, rank = f"{model}.layers.{layer}", text.qk_rope_head_dim, text.kv_lora_rank
        found[f"{name}.input_layernorm.weight"] = found[f"{name}.post_attention_layernorm.weight"] = (hidden,)
        found[f"{name}.self_attn.q_proj.weight"] = (heads * (text.qk_nope_head_dim + rope), hidden)
        found[f"{name}.self_attn.kv_a_proj_with_mqa.weight"] = (rank + rope, hidden)
        found[f"{name}.self_attn.kv_a_layernorm.weight"] = (rank,)
        found[f"{name}.self_attn.kv_b_proj.weight"] = (heads * (text.qk_nope_head_dim + text.v_head_dim), rank)
        found[f"{name}.self_attn.o_proj.weight"] = (hidden, heads * text.v_head_dim)
        found[f"{name}.self_attn.rotary_emb.inv_freq"] = (rope // 2,)
        if layer < text.first_k_dense_replace:
            mlp(f"{name}.mlp", text.intermediate_size)
            continue
        found[f"{name}.mlp.gate.weight"] = (text.n_routed_experts, hidden)
        found[f"{name}.mlp.gate.e_score_correction_bias"] = (text.n_routed_experts,)
        for expert in range(text.n_routed_experts):
            mlp(f"{name}.mlp.experts.{expert}", text.moe_intermediate_size)
        mlp(f"{name}.mlp.shared_experts", text.n_shared_experts * text.moe_intermediate_size)
    found[f"{model}.norm.weight"] = (hidden,)
    found["language_model.lm_head.weight"] = (text.vocab_size, hidden)
    return found


def published_tensors(config: KimiVLConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict:
    """Random contents of unit scale at each layer's output; the router's biases change which experts are taken."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in published_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if "norm" in name and name.endswith("weight"):
            noise = 1 + 0.2 * noise
        elif len(shape) > 1 and "pos_emb" not in name and "embed_tokens" not in name:
            noise = noise / noise[0].numel() ** 0.5
        else:
            noise = 0.3 * noise
        tensors[name] = noise.to(dtype)
    return tensors


def write_tiny(folder: Path, seed: int = 0, dtype: str = "float32") -> dict:
    """Writes a checkpoint of two shards and gives its tensors."""
    config = tiny_json(dtype)
    tensors = published_tensors(KimiVLConfig(**config), seed, getattr(torch, dtype))
    write_checkpoint(folder, tensors, config)
    return tensors
