"""Packed attention over q, k, v (L, heads, d) and offsets: one operator of torch.library, several kernels behind it.

    "flash_attn"    the flash-attn package's variable-length kernel (CUDA)
    "torch_varlen"  torch.nn.attention.varlen, the same kernel inside torch (CUDA)
    "amx"           our own kernel for processors with matrix extensions, bfloat16 (CPU): see `kimivl_lab.kernels.amx`
    "sdpa"          scaled_dot_product_attention per run of images of one size: memory grows with the largest run

The offsets of `kimivl_lab::packed_attention` are data: a trace or a compiled graph holds it as one node that reads
`cu_seqlens` when it runs.
"""

import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import segment_lengths
from .amx.attention import attend
from .amx.library import amx_unavailable


def attend_packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, backend: str) -> Tensor:
    """q, k, v (L, heads, d), offsets (m + 1,) int32 -> (L, heads, d), contiguous.

    Args:
        max_seqlen: a bound of the longest image in patches; any larger one gives the same values.
        backend: "flash_attn", "torch_varlen", "amx" or "sdpa". The last two read the offsets on the host.
    """
    _check_offsets(cu_seqlens)
    if backend == "sdpa":
        return sdpa_segments(q, k, v, cu_seqlens, max_seqlen)
    if backend == "amx":
        return attend(q, k, v, cu_seqlens, max_seqlen)
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


def _check_offsets(cu_seqlens: Tensor) -> None:
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.ndim != 1:
        raise ValueError(f"cu_seqlens must be (m + 1,) int32, got {tuple(cu_seqlens.shape)} {cu_seqlens.dtype}")


def sdpa_segments(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    return sdpa_runs(q, k, v, segment_lengths(cu_seqlens.tolist(), q.shape[0], max_seqlen))


def sdpa_runs(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
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
        if not length:
            continue
        yield start, count, length
        start += count * length
