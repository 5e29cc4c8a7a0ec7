"""Packed attention: every image attends to its own patches, nothing else. One signature, several backends.

A backend takes q, k, v (L, heads, d) in the packed order and an `EncoderMetadata`, and returns (L, heads, d). Scale
d^-0.5, not causal. Rows past the last offset belong to no image: they are not read, and come out as zeros.

    "flash_attn"    the flash-attn package's variable-length kernel (CUDA)
    "torch_varlen"  torch.nn.attention.varlen, the same kernel inside torch (CUDA)
    "amx"           our own kernel for processors with matrix extensions, bfloat16 (CPU): see `kimivl_lab.amx`
    "sdpa"          scaled_dot_product_attention per run of images of one size: memory grows with the largest run
    "sdpa_masked"   one scaled_dot_product_attention over all L patches with an (L, L) block-diagonal mask, for
                    comparison: its memory grows with the square of the batch
    "eager"         float32 scores and softmax, written out: the oracle

The first four are one operator of torch.library, `kimivl_lab::packed_attention`, whose offsets are data: a trace or a
compiled graph holds it as one node that reads `cu_seqlens` when it runs.
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ..amx.attention import attend as amx_attend
from ..amx.attention import longest_image
from ..amx.library import amx_unavailable
from ..watched import is_watched
from .metadata import EncoderMetadata
from .precision import compute_dtype

PackedAttention = Callable[[Tensor, Tensor, Tensor, EncoderMetadata], Tensor]


def attend_packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, backend: str) -> Tensor:
    """q, k, v (L, heads, d), offsets (m + 1,) int32 -> (L, heads, d), contiguous.

    Args:
        max_seqlen: a bound of the longest image in patches; any larger one gives the same values.
        backend: "flash_attn", "torch_varlen", "amx" or "sdpa". The last two read the offsets on the host.
    """
    _check_offsets(cu_seqlens)
    if backend == "sdpa":
        return _sdpa_segments(q, k, v, cu_seqlens, max_seqlen)
    if backend == "amx":
        return amx_attend(q, k, v, cu_seqlens, max_seqlen)
    if backend == "flash_attn":
        flash_attn = importlib.import_module("flash_attn")
        return flash_attn.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    assert isinstance(out, Tensor)
    return out


packed_attention = torch.library.custom_op("kimivl_lab::packed_attention", attend_packed, mutates_args=())


@packed_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, backend: str) -> Tensor:
    _check_offsets(cu_seqlens)
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


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
        return _sdpa_runs(q, k, v, metadata.seqlens)
    attend = partial(packed_attention, backend="sdpa") if is_watched(q) else _sdpa_segments
    return attend(q, k, v, metadata.cu_seqlens, metadata.max_seqlen)


def amx_attention(q: Tensor, k: Tensor, v: Tensor, metadata: EncoderMetadata) -> Tensor:
    """`packed_attention` by our own kernel."""
    attend = packed_attention if is_watched(q) else attend_packed
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


def attention_unavailable(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the backend called `name` cannot run on `device` in `dtype`, or None when it can."""
    if name == "amx":
        return amx_unavailable(device, dtype)
    if name not in ("flash_attn", "torch_varlen"):
        return None
    if device.type != "cuda":
        return f"{name} needs a CUDA device, the tower is on {device}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{name} takes bfloat16 and float16, not {dtype}"
    package = {"flash_attn": "flash_attn", "torch_varlen": "torch.nn.attention.varlen"}[name]
    if importlib.util.find_spec(package) is None:
        install = "pip install flash-attn --no-build-isolation" if name == "flash_attn" else "pip install 'torch>=2.10'"
        return f"{name} needs {package}, which is not installed: {install}"
    return None


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


def _check_offsets(cu_seqlens: Tensor) -> None:
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.ndim != 1:
        raise ValueError(f"cu_seqlens must be (m + 1,) int32, got {tuple(cu_seqlens.shape)} {cu_seqlens.dtype}")


def _sdpa_segments(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    offsets = cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(offsets) if end > start]
    longest_image(offsets, max_seqlen)
    return _sdpa_runs(q, k, v, lengths)


def _sdpa_runs(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """One call per run of consecutive images of equal length."""
    parts, rows = [], 0
    for start, count, length in _runs(lengths):
        rows = start + count * length
        batch = (
            x.narrow(0, start, rows - start).unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v)
        )  # (count, heads, n, d)
        parts.append(F.scaled_dot_product_attention(*batch).transpose(1, 2).flatten(0, 1))  # (count * n, heads, d)
    if len(parts) == 1 and rows == q.shape[0]:
        return parts[0].contiguous()
    return torch.cat((*parts, q.new_zeros((q.shape[0] - rows, *q.shape[1:]))))


def _runs(lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first row, images, length) of each run of equal lengths."""
    start = 0
    for length, group in groupby(lengths):
        count = len(list(group))
        yield start, count, length
        start += count * length
