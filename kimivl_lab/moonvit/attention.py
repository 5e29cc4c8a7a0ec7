"""Packed attention: every image attends to its own patches, nothing else. One signature, several backends.

A backend takes q, k, v (L, heads, d) in the packed order and an `EncoderMetadata`, and returns (L, heads, d). Scale
d^-0.5, not causal. Rows past the last offset belong to no image: they are not read, and come out as zeros.

    "flash_attn"    the flash-attn package's variable-length kernel (CUDA)
    "torch_varlen"  torch.nn.attention.varlen, the same kernel inside torch (CUDA)
    "amx"           our own kernel for processors with matrix extensions, bfloat16 (CPU): see `kimivl_lab.kernels.amx`
    "sdpa"          scaled_dot_product_attention per run of images of one size: memory grows with the largest run
    "sdpa_masked"   one scaled_dot_product_attention over all L patches with an (L, L) block-diagonal mask, for
                    comparison: its memory grows with the square of the batch
    "eager"         float32 scores and softmax, written out: the oracle

The first four are one operator of torch.library, `kimivl_lab::packed_attention`, whose offsets are data: a trace or a
compiled graph holds it as one node that reads `cu_seqlens` when it runs.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.dispatch import compute_dtype, must_dispatch
from ..kernels.packed_attention import attend_packed, attention_unavailable, packed_attention, sdpa_runs, sdpa_segments
from .metadata import EncoderMetadata

PackedAttention = Callable[[Tensor, Tensor, Tensor, EncoderMetadata], Tensor]


def eager_attention(q: Tensor, k: Tensor, v: Tensor, metadata: EncoderMetadata) -> Tensor:
    """softmax(q k^T / sqrt(d)) v per image, in float32 (float64 for float64 input)."""
    precise = compute_dtype(q.dtype)
    out, start = torch.zeros(q.shape, dtype=q.dtype, device=q.device), 0
    for length in metadata.seqlens:
        image = slice(start, start + length)
        one_q, one_k, one_v = (x[image].transpose(0, 1).to(precise) for x in (q, k, v))  # (heads, n, d)
        scores = one_q @ one_k.transpose(-1, -2) * q.shape[-1] ** -0.5  # (heads, n, n)
        out[image] = (scores.softmax(-1) @ one_v).transpose(0, 1).to(q.dtype)
        start += length
    return out


def sdpa_masked_attention(q: Tensor, k: Tensor, v: Tensor, metadata: EncoderMetadata) -> Tensor:
    """One call with an (L, L) boolean mask that is true inside each image."""
    rows = torch.arange(metadata.num_patches, device=q.device, dtype=torch.int32)
    image = torch.bucketize(rows, metadata.cu_seqlens[1:], right=True)  # (L,)
    mask = image[:, None] == image[None, :]
    out = F.scaled_dot_product_attention(*(x[: len(rows)].transpose(0, 1)[None] for x in (q, k, v)), attn_mask=mask)
    padding = q.new_zeros((q.shape[0] - len(rows), *q.shape[1:]))
    return torch.cat((out[0].transpose(0, 1), padding))


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, metadata: EncoderMetadata) -> Tensor:
    """`packed_attention` where the offsets are on the host (as an operator where somebody watches, as plain calls
    elsewhere); on other devices the same from the host's own lengths, with no read."""
    if q.device.type != "cpu":
        return sdpa_runs(q, k, v, metadata.seqlens)
    attend = partial(packed_attention, backend="sdpa") if must_dispatch(q) else sdpa_segments
    return attend(q, k, v, metadata.cu_seqlens, metadata.max_seqlen)


def amx_attention(q: Tensor, k: Tensor, v: Tensor, metadata: EncoderMetadata) -> Tensor:
    """`packed_attention` by our own kernel."""
    attend = packed_attention if must_dispatch(q) else attend_packed
    return attend(q, k, v, metadata.cu_seqlens, metadata.max_seqlen, "amx")


def _kernel_attention(q: Tensor, k: Tensor, v: Tensor, metadata: EncoderMetadata, *, backend: str) -> Tensor:
    return packed_attention(q, k, v, metadata.cu_seqlens, metadata.max_seqlen, backend)


ATTENTION_BACKENDS: dict[str, PackedAttention] = {
    "flash_attn": partial(_kernel_attention, backend="flash_attn"),
    "torch_varlen": partial(_kernel_attention, backend="torch_varlen"),
    "amx": amx_attention,
    "sdpa": sdpa_attention,
    "sdpa_masked": sdpa_masked_attention,
    "eager": eager_attention,
}


def resolve_attention(
    name: str, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> PackedAttention:
    """The backend called `name`; "auto" takes the first of the list that runs here. ValueError if it cannot.

    "amx" has no backward: where gradients are enabled it is "sdpa".
    """
    device = torch.device(device)
    if name == "auto":
        name = next(known for known in ATTENTION_BACKENDS if attention_unavailable(known, device, dtype) is None)
    if name not in ATTENTION_BACKENDS:
        raise ValueError(f"unknown attention backend {name!r}: 'auto' or one of {', '.join(ATTENTION_BACKENDS)}")
    if reason := attention_unavailable(name, device, dtype):
        raise ValueError(reason)
    return ATTENTION_BACKENDS["sdpa" if name == "amx" and torch.is_grad_enabled() else name]
