"""The encoder: pre-norm transformer blocks and a final norm, over one packed sequence.

Block: x += wo(attention(rope(wqkv(norm0 x)))); x += fc1(gelu_tanh(fc0(norm1 x))). Every linear map has a bias.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..config import EncoderOptions, MoonViTConfig
from ..kernels.dispatch import CompiledFunction
from ..kernels.packed_linear import GELU_TANH, FusedLinear, PackedKernel, refresh_packed, resolve_linear
from ..kernels.rotation import Rotation, resolve_rotation, rotate_real
from .attention import PackedAttention, resolve_attention
from .metadata import EncoderMetadata


@dataclass(frozen=True)
class Kernels:
    """`EncoderOptions` made concrete for one forward on one device."""

    rotate: Rotation
    attend: PackedAttention
    linear: PackedKernel | None
    compiled: bool = False

    @classmethod
    def resolve(cls, options: EncoderOptions, device: torch.device, dtype: torch.dtype) -> "Kernels":
        """ValueError for an option that is unknown or cannot run here; "auto" never fails."""
        rotate = resolve_rotation(options.rope, device, dtype, inference=not torch.is_grad_enabled())
        attend = resolve_attention(options.attention, device, dtype)
        linear = resolve_linear(options.linear, device, dtype)
        if options.compile:
            return cls(rotate_real, attend, None, compiled=True)
        return cls(rotate, attend, linear)


class MLP2(nn.Module):
    """fc1(gelu_tanh(fc0 x)), plus a residual if there is one."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.fc0 = FusedLinear(dim, hidden_dim)
        self.fc1 = FusedLinear(hidden_dim, dim)

    def forward(self, x: Tensor, residual: Tensor | None = None, *, kernel: PackedKernel | None = None) -> Tensor:
        """(L, D) -> (L, D)."""
        return self.fc1(self.fc0(x, GELU_TANH, kernel=kernel), residual=residual, kernel=kernel)


class MoonVitEncoderLayer(nn.Module):
    """One block."""

    def __init__(self, config: MoonViTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.norm0 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.wqkv = FusedLinear(config.hidden_size, 3 * config.hidden_size)
        self.wo = FusedLinear(config.hidden_size, config.hidden_size)
        self.mlp = MLP2(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, metadata: EncoderMetadata, kernels: Kernels) -> Tensor:
        """(L, D) -> (L, D)."""
        qkv = self.wqkv(self.norm0(x), kernel=kernels.linear).unflatten(-1, (3, self.num_heads, -1))
        q, k = kernels.rotate(qkv.narrow(1, 0, 2), metadata.rope_cos_sin).unbind(1)  # (L, heads, d) each
        mixed = kernels.attend(q, k, qkv.select(1, 2), metadata).flatten(1)  # (L, D)
        x = self.wo(mixed, residual=x, kernel=kernels.linear)
        return self.mlp(self.norm1(x), residual=x, kernel=kernels.linear)


compiled_block = CompiledFunction(MoonVitEncoderLayer.forward, "the encoder's block")


class MoonVitEncoder(nn.Module):
    """All blocks and the final norm."""

    def __init__(self, config: MoonViTConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MoonVitEncoderLayer(config) for _ in range(config.num_hidden_layers))
        self.final_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x: Tensor, metadata: EncoderMetadata, kernels: Kernels) -> Tensor:
        """(L, D) -> (L, D)."""
        if kernels.linear is not None:
            refresh_packed(self, kernels.linear)
        run = compiled_block if kernels.compiled else MoonVitEncoderLayer.__call__
        for block in self.blocks:
            x = run(block, x, metadata, kernels)
        return self.final_layernorm(x)
