"""Packed attention: each image attends to its own patches only. One signature, several backends.

A backend takes q, k, v (L, heads, d) in packed order and an `EncoderMetadata`, and returns (L, heads, d). The scale is
d^-0.5; the attention is not causal. Rows past the last offset belong to no image: they are not read and become zeros.

    a kernel's name  one of `kimivl_lab.kernels.packed_attention`, "sdpa" among them
    "sdpa_masked"    one scaled_dot_product_attention over all L patches with an (L, L) block-diagonal mask, for
                     comparison: its memory grows with the square of the batch
    "eager"          float32 scores and softmax, written out: the reference that tests compare with

The metadata has checked its offsets when it was made; a backend checks only that q has a row for each patch.

Test: tests/test_attention.py. Record: attention__*.csv.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.dispatch import compute_dtype, is_traced, must_dispatch
from ..kernels.packed_attention import (
    KERNELS,
    WITHOUT_BACKWARD,
    attend_packed,
    attention_unavailable,
    packed_attention,
    sdpa_runs,
)
from .metadata import EncoderMetadata

PackedAttention = Callable[[Tensor, Tensor, Tensor, EncoderMetadata], Tensor]


def eager_attention(q: Tensor, k: Tensor, v: Tensor, metadata: EncoderMetadata) -> Tensor:
    """softmax(q k^T / sqrt(d)) v per image, in float32 (float64 for float64 input)."""
    _require_rows(q, metadata)
    precise = compute_dtype(q.dtype)
    out, start = torch.zeros(q.shape, dtype=q.dtype, device=q.device), 0
    for length in metadata.seqlens:
        image = slice(start, start + length)
        q_i, k_i, v_i = (x[image].transpose(0, 1).to(precise) for x in (q, k, v))  # (heads, n, d)
        scores = q_i @ k_i.transpose(-1, -2) * q.shape[-1] ** -0.5  # (heads, n, n)
        out[image] = (scores.softmax(-1) @ v_i).transpose(0, 1).to(q.dtype)
        start += length
    return out


def sdpa_masked_attention(q: Tensor, k: Tensor, v: Tensor, metadata: EncoderMetadata) -> Tensor:
    """One call with an (L, L) boolean mask that is true where both patches are of one image."""
    _require_rows(q, metadata)
    rows = torch.arange(metadata.num_patches, device=q.device, dtype=torch.int32)
    image = torch.bucketize(rows, metadata.cu_seqlens[1:], right=True)  # (L,)
    mask = image[:, None] == image[None, :]
    out = F.scaled_dot_product_attention(*(x[: len(rows)].transpose(0, 1)[None] for x in (q, k, v)), attn_mask=mask)
    return _with_zeros(out[0].transpose(0, 1), q)


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, metadata: EncoderMetadata) -> Tensor:
    """One call per run of images of equal length.

    The lengths are host integers of the metadata, so no device is read. A trace or a captured graph must not contain
    them: there the offsets stay data, by the operator on a CPU, by a mask on a GPU.
    """
    if q.device.type == "cpu" and (must_dispatch(q) or not metadata.lengths_on_host):
        return kernel_attention(q, k, v, metadata, kernel="sdpa")
    if not metadata.lengths_on_host:
        return sdpa_masked_attention(q, k, v, metadata)
    _require_rows(q, metadata)
    return sdpa_runs(q, k, v, metadata.seqlens)


def kernel_attention(q: Tensor, k: Tensor, v: Tensor, metadata: EncoderMetadata, *, kernel: str) -> Tensor:
    """By a kernel of `kimivl_lab.kernels.packed_attention`, which reads the offsets where they lie."""
    dispatched = must_dispatch(q)
    attend = packed_attention if dispatched else attend_packed
    out = attend(q, k, v, metadata.cu_seqlens, metadata.max_seqlen, kernel)
    # A compiled graph must not hold the number of patches, or each batch would compile anew.
    if (dispatched and is_traced(q)) or metadata.num_patches == q.shape[0]:
        return out
    _require_rows(q, metadata)
    return _with_zeros(out[: metadata.num_patches], q)  # CUDA kernels do not write the rows of no image


ATTENTION_BACKENDS: dict[str, PackedAttention] = {
    **{kernel: partial(kernel_attention, kernel=kernel) for kernel in KERNELS},
    "sdpa": sdpa_attention,
    "sdpa_masked": sdpa_masked_attention,
    "eager": eager_attention,
}


def resolve_attention(
    name: str, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> PackedAttention:
    """The backend called `name`; "auto" takes the first of the list that runs here. ValueError if it cannot.

    Where gradients are enabled, a kernel without a backward is replaced by "sdpa".
    """
    device = torch.device(device)
    if name == "auto":
        name = next(known for known in ATTENTION_BACKENDS if attention_unavailable(known, device, dtype) is None)
    if name not in ATTENTION_BACKENDS:
        raise ValueError(f"unknown attention backend {name!r}: 'auto' or one of {', '.join(ATTENTION_BACKENDS)}")
    if reason := attention_unavailable(name, device, dtype):
        raise ValueError(reason)
    return ATTENTION_BACKENDS["sdpa" if name in WITHOUT_BACKWARD and torch.is_grad_enabled() else name]


def attends_all_pairs(attend: PackedAttention, device: torch.device, *, lengths_on_host: bool) -> bool:
    """Whether `attend` computes the score of every pair of patches of a call, masked, and not of each image alone.

    True of "sdpa_masked", and of "sdpa" on a GPU where the lengths are not on the host: in a captured graph.
    """
    return attend is sdpa_masked_attention or (
        attend is sdpa_attention and device.type != "cpu" and not lengths_on_host
    )


def _require_rows(q: Tensor, metadata: EncoderMetadata) -> None:
    if metadata.num_patches > q.shape[0]:
        raise ValueError(f"q holds {q.shape[0]} patches, the grids of the metadata need {metadata.num_patches}")


def _with_zeros(out: Tensor, q: Tensor) -> Tensor:
    return torch.cat((out, q.new_zeros((q.shape[0] - out.shape[0], *q.shape[1:]))))
