"""Another implementation of MoonViT with this library's weights: ours is checked against it and timed beside it.

Records of 2026 also have the variant "open-moonvit", a package that no environment of ours installed and no test ran.

Test: tests/test_parity.py, tests/test_benchmarks.py. Record: encoder__*.csv.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers.models.kimi_k25.configuration_kimi_k25 import Kimi_K25VisionConfig
from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25VisionModel

from ..geometry import GridLike
from ..moonvit.model import MoonVitPretrainedModel

_LAYER_NAMES = {"norm0": "norm1", "norm1": "norm2", "wo": "attn.proj", "mlp.fc0": "mlp.fc1", "mlp.fc1": "mlp.fc2"}


def kimi_k25_tower(tower: MoonVitPretrainedModel) -> Kimi_K25VisionModel:
    """transformers' Kimi-K2.5 vision tower holding `tower`'s weights; at one frame (t = 1) it is Kimi-VL's.

    It keeps q, k and v apart and turns contiguous halves, so q and k rows of each head are re-ordered from neighbour
    pairs (0, 1, 2, 3, ...) to (0, 2, 4, ..., 1, 3, 5, ...).
    """
    ours = tower.config
    config = Kimi_K25VisionConfig(
        patch_size=ours.patch_size,
        pos_emb_height=ours.init_pos_emb_height,
        pos_emb_width=ours.init_pos_emb_width,
        num_attention_heads=ours.num_attention_heads,
        num_hidden_layers=ours.num_hidden_layers,
        hidden_size=ours.hidden_size,
        intermediate_size=ours.intermediate_size,
        merge_kernel_size=ours.merge_kernel_size,
    )
    config._attn_implementation = "sdpa"
    peer = Kimi_K25VisionModel(config).to(dtype=tower.dtype, device=tower.device).eval()
    mapped = {
        "patch_embed.pos_emb.position_embeddings": tower.patch_embed.pos_emb.weight,
        **{f"patch_embed.proj.{name}": value for name, value in tower.patch_embed.proj.named_parameters()},
        **{f"final_layernorm.{name}": value for name, value in tower.encoder.final_layernorm.named_parameters()},
    }
    for index, block in enumerate(tower.encoder.blocks):
        prefix = f"layers.{index}."
        for name, value in block.named_parameters():
            module, kind = name.rsplit(".", 1)
            if module == "wqkv":
                for part, rows in zip("qkv", value.chunk(3), strict=True):
                    rows = rows if part == "v" else halves_from_pairs(rows, ours.num_attention_heads)
                    mapped[f"{prefix}attn.{part}_proj.{kind}"] = rows
            else:
                mapped[f"{prefix}{_LAYER_NAMES[module]}.{kind}"] = value
    peer.load_state_dict({name: value.detach() for name, value in mapped.items()}, strict=True)
    angles, _ = peer.rotary_emb.compute_axial_rope_parameters(config)
    peer.rotary_emb.inv_freq = angles.to(tower.device)  # the cast to the tower's dtype rounded them
    return peer


def halves_from_pairs(rows: Tensor, num_heads: int) -> Tensor:
    """Rows (heads * d, ...) of q or k: each head's neighbour pairs become contiguous halves."""
    per_head = rows.unflatten(0, (num_heads, -1, 2))  # (heads, d/2, 2, ...)
    return per_head.transpose(1, 2).flatten(0, 2)


def grid_thw(grid_hws: Sequence[GridLike], device: torch.device | str = "cpu") -> Tensor:
    """The peer's grids: (n, 3) int64 with one frame each."""
    return torch.tensor([(1, h, w) for h, w in grid_hws], dtype=torch.int64, device=device).reshape(-1, 3)


def peers(tower: MoonVitPretrainedModel) -> dict[str, Callable[[Tensor, Sequence[GridLike]], Callable[[], Tensor]]]:
    """Peers by name: from (pixel values, grids) to a call that gives (T, 4, D)."""
    k25 = kimi_k25_tower(tower)

    def transformers(pixels: Tensor, grids: Sequence[GridLike]) -> Callable[[], Tensor]:
        grids_thw = grid_thw(grids, pixels.device)
        pixels = pixels.to(tower.dtype)
        return lambda: k25(pixels, grid_thw=grids_thw).pooler_output

    return {"transformers": transformers}
