"""Other implementations of MoonViT with this library's weights: ours is checked against them and timed beside them.

    transformers   Kimi-K2.5's tower at one frame, always there
    kornia         `kornia.models.kimi_vl`, tower and projector, where kornia 0.9 is installed; it takes images of one
                   size a batch, so a mixed batch is one call a size
    vllm           vLLM 0.32's MoonViT without a server, where vllm is installed (`make engine-venv`)

Records of 2026 also have the variant "open-moonvit", a package that no environment of ours installed and no test ran.

Test: tests/test_parity.py, tests/test_benchmarks.py. Record: encoder__*.csv.
"""

import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.models.kimi_k25.configuration_kimi_k25 import Kimi_K25VisionConfig
from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25VisionModel

from ..geometry import GridLike, as_grid_list, patch_counts
from ..moonvit.model import MoonVitPretrainedModel

Prepare: TypeAlias = Callable[[Tensor, Sequence[GridLike]], Callable[[], Tensor]]

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


def kornia_model(tower: MoonVitPretrainedModel, projector: nn.Module | None = None) -> Any:
    """kornia's `KimiVLModel` holding `tower`'s weights, and the projector's where one is given.

    It turns neighbour pairs as we do, so q, k and v are the thirds of `wqkv`.

    Raises:
        ModuleNotFoundError: kornia is not installed.
    """
    from kornia.models.kimi_vl import KimiVLConfig, KimiVLModel, KimiVLProjectorConfig, MoonViTConfig

    ours = tower.config
    config = MoonViTConfig(
        patch_size=ours.patch_size,
        init_pos_emb_height=ours.init_pos_emb_height,
        init_pos_emb_width=ours.init_pos_emb_width,
        hidden_size=ours.hidden_size,
        num_hidden_layers=ours.num_hidden_layers,
        num_attention_heads=ours.num_attention_heads,
        intermediate_size=ours.intermediate_size,
    )
    given = {} if projector is None else dict(projector.named_parameters())
    hidden, out = (given[f"linear_{n}.weight"].shape[0] if given else 1 for n in (1, 2))
    sizes = KimiVLProjectorConfig(input_dim=ours.hidden_size, hidden_dim=hidden, output_dim=out)
    peer = KimiVLModel(KimiVLConfig(config, sizes)).to(dtype=tower.dtype, device=tower.device).eval()
    names = {"pre_norm": "pre_norm", "linear_1": "mlp.0", "linear_2": "mlp.2"}
    mapped = {"vision_encoder.pos_embed": tower.patch_embed.pos_emb.weight.flatten(0, 1)[None]}
    for name, value in given.items():
        module, kind = name.split(".")
        mapped[f"projector.{names[module]}.{kind}"] = value
    for prefix, module in (("patch_embed", tower.patch_embed.proj), ("norm", tower.encoder.final_layernorm)):
        mapped |= {f"vision_encoder.{prefix}.{name}": value for name, value in module.named_parameters()}
    for index, block in enumerate(tower.encoder.blocks):
        prefix = f"vision_encoder.encoder.layers.{index}."
        for name, value in block.named_parameters():
            module, kind = name.rsplit(".", 1)
            if module == "wqkv":
                mapped |= {
                    f"{prefix}attn.{part}_proj.{kind}": rows for part, rows in zip("qkv", value.chunk(3), strict=True)
                }
            else:
                mapped[f"{prefix}{_LAYER_NAMES[module].replace('attn.proj', 'attn.out_proj')}.{kind}"] = value
    peer.load_state_dict({name: value.detach() for name, value in mapped.items()}, strict=bool(given))
    return peer


def images_by_size(pixels: Tensor, grid_hws: Sequence[GridLike]) -> list[tuple[list[int], Tensor]]:
    """The patches (L, 3, p, p) of a batch as whole images: for each size, which images have it, and (B, 3, H, W)."""
    grids = as_grid_list(grid_hws)
    parts = pixels.split(patch_counts(grids))
    batches = []
    for size in dict.fromkeys(grids):
        which = [index for index, grid in enumerate(grids) if grid == size]
        patches = torch.stack([parts[index] for index in which]).unflatten(1, (size.h, size.w))  # (B, h, w, 3, p, p)
        batches.append((which, patches.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3).contiguous()))
    return batches


def kornia_features(model: Any, batches: Sequence[tuple[list[int], Tensor]], *, projected: bool = False) -> Tensor:
    """What `model` makes of `images_by_size`: (T, 4, D), or (T, out) with its projector."""
    by_image: dict[int, Tensor] = {}
    for which, images in batches:
        if projected:
            features = model(images)
        else:
            h, w = (side // model.patch_size for side in images.shape[2:])
            grid = model.vision_encoder(images).unflatten(1, (h // 2, 2, w // 2, 2))  # (B, h/2, 2, w/2, 2, D)
            features = grid.transpose(2, 3).flatten(3, 4).flatten(1, 2)  # (B, T, 4, D)
        by_image |= dict(zip(which, features, strict=True))
    return torch.cat([by_image[index] for index in sorted(by_image)])


def vllm_tower(tower: MoonVitPretrainedModel) -> Any:
    """vLLM's `MoonVitPretrainedModel` holding `tower`'s weights, whose names are the same, for one rank.

    It joins vLLM's process groups: torch.distributed is initialised for this process alone if it is not yet.

    Raises:
        ModuleNotFoundError: vllm is not installed.
    """
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.model_executor.models.moonvit import MoonVitPretrainedModel as VllmTower
    from vllm.transformers_utils.configs.moonvit import MoonViTConfig

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(tower.dtype)  # layers and attention choose their kernels by it
    try:
        with set_current_vllm_config(VllmConfig()):
            init_distributed_environment(1, 0, "env://", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
            peer = VllmTower(MoonViTConfig(**dataclasses.asdict(tower.config))).to(tower.device).eval()
    finally:
        torch.set_default_dtype(before)
    peer.load_state_dict({name: value.detach() for name, value in tower.named_parameters()}, strict=True)
    for module in peer.modules():  # as vLLM's loader does: on a CPU the weights are packed here
        method = getattr(module, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(module)
    return peer


def peers(tower: MoonVitPretrainedModel, names: Sequence[str] | None = None) -> dict[str, Prepare]:
    """Peers by name: from (pixel values, grids) to a call that gives (T, 4, D).

    Args:
        names: of `PEERS`, beside transformers; None: all that are installed.
    """
    if names is None:
        names = [name for name in PEERS if importlib.util.find_spec(name) is not None]
    return {name: PEERS[name](tower) for name in dict.fromkeys(("transformers", *names))}


def _transformers(tower: MoonVitPretrainedModel) -> Prepare:
    model = kimi_k25_tower(tower)

    def prepare(pixels: Tensor, grids: Sequence[GridLike]) -> Callable[[], Tensor]:
        grids_thw = grid_thw(grids, pixels.device)
        pixels = pixels.to(tower.dtype)
        return lambda: model(pixels, grid_thw=grids_thw).pooler_output

    return prepare


def _kornia(tower: MoonVitPretrainedModel) -> Prepare:
    model = kornia_model(tower)

    def prepare(pixels: Tensor, grids: Sequence[GridLike]) -> Callable[[], Tensor]:
        batches = images_by_size(pixels.to(tower.dtype), grids)
        return lambda: kornia_features(model, batches)

    return prepare


def _vllm(tower: MoonVitPretrainedModel) -> Prepare:
    model = vllm_tower(tower)

    def prepare(pixels: Tensor, grids: Sequence[GridLike]) -> Callable[[], Tensor]:
        pixels, sizes = pixels.to(tower.dtype), torch.tensor(as_grid_list(grids), device=pixels.device)
        return lambda: torch.cat(model(pixels, sizes))

    return prepare


PEERS: dict[str, Callable[[MoonVitPretrainedModel], Prepare]] = {
    "transformers": _transformers,
    "kornia": _kornia,
    "vllm": _vllm,
}
