"""Independent implementations of MoonViT with this library's weights: what ours is checked against and timed beside."""

from collections.abc import Callable, Sequence
from importlib import import_module

import torch
from torch import Tensor
from transformers.models.kimi_k25.configuration_kimi_k25 import Kimi_K25VisionConfig
from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25VisionModel

from ..geometry import GridLike, patch_counts
from ..moonvit.merger import patch_merger_packed
from ..moonvit.metadata import build_merge_gather_idx
from ..moonvit.model import MoonVitPretrainedModel

_LAYER_NAMES = {"norm0": "norm1", "norm1": "norm2", "wo": "attn.proj", "mlp.fc0": "mlp.fc1", "mlp.fc1": "mlp.fc2"}


def kimi_k25_tower(tower: MoonVitPretrainedModel, attention: str = "sdpa") -> Kimi_K25VisionModel:
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
    config._attn_implementation = attention
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


def open_moonvit_tower(tower: MoonVitPretrainedModel) -> torch.nn.Module:
    """The open-moonvit package's tower holding `tower`'s weights. ImportError where it is not installed.

    It turns the rows' axis in the first half of each head and the columns' in the second, contiguous halves in each.
    """
    open_moonvit = import_module("open_moonvit")
    ours = tower.config
    config = open_moonvit.MoonViTConfig(
        hidden_size=ours.hidden_size,
        intermediate_size=ours.intermediate_size,
        num_hidden_layers=ours.num_hidden_layers,
        num_attention_heads=ours.num_attention_heads,
        patch_size=ours.patch_size,
        layer_norm_eps=ours.layer_norm_eps,
        abs_pos_embed_grid_size=ours.init_pos_emb_height,
    )
    names = {
        "norm0": "layer_norm1",
        "norm1": "layer_norm2",
        "wqkv": "self_attn.qkv",
        "wo": "self_attn.proj",
        "mlp.fc0": "mlp.fc1",
        "mlp.fc1": "mlp.fc2",
    }
    mapped = {
        "pos_embed.pos_embed": tower.patch_embed.pos_emb.weight.flatten(0, 1),
        **{f"patch_embed.proj.{name}": value for name, value in tower.patch_embed.proj.named_parameters()},
        **{f"post_layernorm.{name}": value for name, value in tower.encoder.final_layernorm.named_parameters()},
    }
    for index, block in enumerate(tower.encoder.blocks):
        for name, value in block.named_parameters():
            module, kind = name.rsplit(".", 1)
            if module == "wqkv":
                q, k, v = value.chunk(3)
                q, k = (_axes_apart(rows, ours.num_attention_heads) for rows in (q, k))
                value = torch.cat((q, k, v))
            mapped[f"layers.{index}.{names[module]}.{kind}"] = value
    peer = open_moonvit.MoonViT(config).to(dtype=tower.dtype, device=tower.device).eval()
    peer.load_state_dict({name: value.detach() for name, value in mapped.items()}, strict=False)
    missing = set(peer.state_dict()) - set(mapped)
    if any("inv_freq" not in name for name in missing):
        raise ValueError(f"open-moonvit has parameters that MoonViT has not: {', '.join(sorted(missing))}")
    return peer


def peers(tower: MoonVitPretrainedModel) -> dict[str, Callable[[Tensor, Sequence[GridLike]], Callable[[], Tensor]]]:
    """Peers by name, "transformers" first: from (pixel values, grids) to a call that gives (T, 4, D)."""
    k25 = kimi_k25_tower(tower)

    def transformers(pixels: Tensor, grids: Sequence[GridLike]) -> Callable[[], Tensor]:
        grids_thw = grid_thw(grids, pixels.device)
        pixels = pixels.to(tower.dtype)
        return lambda: k25(pixels, grid_thw=grids_thw).pooler_output

    found: dict[str, Callable[[Tensor, Sequence[GridLike]], Callable[[], Tensor]]] = {"transformers": transformers}
    try:
        other = open_moonvit_tower(tower)
    except ImportError:
        return found

    def open_moonvit(pixels: Tensor, grids: Sequence[GridLike]) -> Callable[[], Tensor]:
        order = build_merge_gather_idx(grids, tower.config.merge_kernel_size).to(pixels.device)
        images = [
            patches.unflatten(0, grid).permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2).contiguous()
            for patches, grid in zip(pixels.to(tower.dtype).split(patch_counts(grids)), grids, strict=True)
        ]  # (3, 14 h, 14 w) each
        return lambda: patch_merger_packed(other(images).last_hidden_state, order, tower.config.merge_size)

    return found | {"open-moonvit": open_moonvit}


def _axes_apart(rows: Tensor, num_heads: int) -> Tensor:
    """Rows of q or k: each head's (slot, axis, re or im) becomes (axis, re or im, slot), rows before columns."""
    per_head = rows.unflatten(0, (num_heads, -1, 2, 2))  # (heads, d/4, axis, 2, ...)
    return per_head.flip(2).permute(0, 2, 3, 1, *range(4, per_head.ndim)).flatten(0, 3)
