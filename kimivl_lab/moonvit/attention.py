"""Packed attention: every image attends to its own patches, nothing else. One signature, several backends.

A backend takes q, k, v (L, heads, d) in the packed order and an `EncoderMetadata`, and returns (L, heads, d). Scale
d^-0.5, not causal.

    "eager"        float32 scores and softmax, written out: the oracle
    "sdpa_masked"  one scaled_dot_product_attention over all L patches with an (L, L) block-diagonal mask: for
                   comparison; its memory grows with the square of the batch
    "sdpa"         one scaled_dot_product_attention per image: memory grows with the largest image only
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .metadata import EncoderMetadata
from .precision import compute_dtype

PackedAttention = Callable[[Tensor, Tensor, Tensor, EncoderMetadata], Tensor]


def eager_attention(q: Tensor, k: Tensor, v: Tensor, metadata: EncoderMetadata) -> Tensor:
    """softmax(q k^T / sqrt(d)) v per image, in float32 (float64 for float64 input)."""
    precise = compute_dtype(q.dtype)
    out = []
    for one_q, one_k, one_v in _segments(q, k, v, metadata):
        scores = one_q.to(precise) @ one_k.to(precise).transpose(-1, -2) * q.shape[-1] ** -0.5  # (heads, n, n)
        out.append((scores.softmax(-1) @ one_v.to(precise)).transpose(0, 1))  # (n, heads, d)
    return torch.cat(out).to(q.dtype) if out else torch.empty_like(q)


def sdpa_masked_attention(q: Tensor, k: Tensor, v: Tensor, metadata: EncoderMetadata) -> Tensor:
    """One call with an (L, L) boolean mask that is true inside each image."""
    image = torch.bucketize(
        torch.arange(q.shape[0], device=q.device, dtype=torch.int32), metadata.cu_seqlens[1:], right=True
    )  # (L,)
    mask = image[:, None] == image[None, :]
    return F.scaled_dot_product_attention(_heads_first(q), _heads_first(k), _heads_first(v), attn_mask=mask)[
        0
    ].transpose(0, 1)


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, metadata: EncoderMetadata) -> Tensor:
    """One call per image."""
    out = [
        F.scaled_dot_product_attention(one_q[None], one_k[None], one_v[None])[0].transpose(0, 1)
        for one_q, one_k, one_v in _segments(q, k, v, metadata)
    ]
    return torch.cat(out) if out else torch.empty_like(q)


ATTENTION_BACKENDS: dict[str, PackedAttention] = {
    "sdpa": sdpa_attention,
    "sdpa_masked": sdpa_masked_attention,
    "eager": eager_attention,
}


def resolve_attention(name: str) -> PackedAttention:
    """The backend called `name`; "auto" takes the fastest that runs here."""
    if name == "auto":
        return sdpa_attention
    if name not in ATTENTION_BACKENDS:
        raise ValueError(f"unknown attention backend {name!r}: 'auto' or one of {', '.join(ATTENTION_BACKENDS)}")
    return ATTENTION_BACKENDS[name]


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).unsqueeze(0)  # (1, heads, L, d)


def _segments(q: Tensor, k: Tensor, v: Tensor, metadata: EncoderMetadata) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(heads, n, d) views of each image."""
    start = 0
    for length in metadata.seqlens:
        end = start + length
        yield q[start:end].transpose(0, 1), k[start:end].transpose(0, 1), v[start:end].transpose(0, 1)
        start = end
