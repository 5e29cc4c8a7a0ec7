"""The encoder: pre-norm transformer blocks and a final norm, over one packed sequence.

Block: x += wo(attention(rope(wqkv(norm0 x)))); x += fc1(gelu_tanh(fc0(norm1 x))). Every linear map has a bias.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from ..config import MoonViTConfig
from .attention import PackedAttention
from .metadata import EncoderMetadata
from .rope import Rotation


class MLP2(nn.Module):
    """fc1(gelu_tanh(fc0 x))."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.fc0 = nn.Linear(dim, hidden_dim)
        self.fc1 = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc1(F.gelu(self.fc0(x), approximate="tanh"))


class MoonVitEncoderLayer(nn.Module):
    """One block."""

    def __init__(self, config: MoonViTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.norm0 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.wqkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.wo = nn.Linear(config.hidden_size, config.hidden_size)
        self.mlp = MLP2(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, metadata: EncoderMetadata, rotate: Rotation, attend: PackedAttention) -> Tensor:
        """(L, D) -> (L, D)."""
        qkv = self.wqkv(self.norm0(x)).unflatten(-1, (3, self.num_heads, -1))  # (L, 3, heads, d)
        q, k = rotate(qkv[:, :2], metadata.rope_cos_sin).unbind(1)  # (L, heads, d) each
        v = qkv[:, 2]
        x = x + self.wo(attend(q, k, v, metadata).flatten(1))
        return x + self.mlp(self.norm1(x))


class MoonVitEncoder(nn.Module):
    """All blocks and the final norm."""

    def __init__(self, config: MoonViTConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MoonVitEncoderLayer(config) for _ in range(config.num_hidden_layers))
        self.final_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x: Tensor, metadata: EncoderMetadata, rotate: Rotation, attend: PackedAttention) -> Tensor:
        """(L, D) -> (L, D)."""
        for block in self.blocks:
            x = block(x, metadata, rotate, attend)
        return self.final_layernorm(x)
