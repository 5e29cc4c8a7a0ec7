"""Packed attention over q, k, v (L, heads, d) and offsets: one operator of torch.library, several kernels behind it.

    "flash_attn"    the flash-attn package's variable-length kernel (CUDA)
    "torch_varlen"  torch.nn.attention.varlen, the same kernel inside torch (CUDA)
    "amx"           this library's kernel for processors with matrix extensions, bfloat16 (CPU)
    "simd"          this library's kernel for AVX2 and AVX-512, which computes in float32 (CPU)
    "sdpa"          scaled_dot_product_attention, once per run of images of equal length: its memory grows with the
                    largest run

The offsets of the operator `kimivl_lab::packed_attention` are data: a trace or a compiled graph holds the operator as
one node that reads `cu_seqlens` when it runs. Example: offsets [0, 2, 6, 9] are three images of 2, 4 and 3 patches.

The operator has a backward for every kernel, `kimivl_lab::packed_attention_backward`. `attend_packed` called directly
uses the backward of the kernel itself; "amx" and "simd" have none.

Test: tests/test_attention.py, tests/test_amx.py, tests/test_simd.py. Record: attention__*.csv.
"""

import importlib
import importlib.util
from collections.abc import Sequence
from functools import cache
from itertools import groupby, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import segment_lengths
from .dispatch import compute_dtype
from .host_attention import attend
from .library import LIBRARIES, unavailable

KERNELS = ("flash_attn", "torch_varlen", "amx", "simd", "sdpa")  # the first that runs is the fastest
_LEAST_CAPABILITY = (8, 0)  # of a GPU, for the two CUDA kernels
WITHOUT_BACKWARD = ("amx", "simd")


def attend_packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, backend: str) -> Tensor:
    """q, k, v (L, heads, d), offsets (m + 1,) int32 -> (L, heads, d), contiguous.

    Args:
        max_seqlen: an upper bound of the longest image in patches; any larger bound gives the same values.
        backend: one of `KERNELS`. Those of a CPU read the offsets on the host, and write zeros past the last offset,
            where the first two write nothing.

    Raises:
        ValueError: another backend; offsets that are not int32, or that the host reads and that do not rise from 0 to
            at most L; an image longer than `max_seqlen`.
    """
    _require_int32(cu_seqlens)
    if backend == "sdpa":
        return sdpa_runs(q, k, v, segment_lengths(cu_seqlens.tolist(), q.shape[0], max_seqlen))
    if backend in LIBRARIES:
        return attend(backend, q, k, v, cu_seqlens, max_seqlen)
    if backend == "flash_attn":
        flash_attn = importlib.import_module("flash_attn")
        return flash_attn.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    if backend != "torch_varlen":
        raise ValueError(f"unknown attention kernel {backend!r}: one of {', '.join(KERNELS)}")
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    assert isinstance(out, Tensor)
    return out


packed_attention = torch.library.custom_op("kimivl_lab::packed_attention", attend_packed, mutates_args=())


@packed_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, backend: str) -> Tensor:
    _require_int32(cu_seqlens)
    return q.new_empty(q.shape)


def attend_packed_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v (L, heads, d) from that of the result: plain and right for every kernel, not fast.

    Image by image, with the scores computed again in float32 (float64 for float64 input). Reads the offsets on the
    host.
    """
    precise, scale = compute_dtype(q.dtype), q.shape[-1] ** -0.5
    grads = [x.new_zeros(x.shape) for x in (q, k, v)]
    for start, end in pairwise(cu_seqlens.tolist()):
        image = slice(start, end)
        dy_i, q_i, k_i, v_i = (x[image].transpose(0, 1).to(precise) for x in (grad, q, k, v))  # (heads, n, d)
        p = (q_i @ k_i.mT * scale).softmax(-1)  # (heads, n, n)
        dp = dy_i @ v_i.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
        for out, value in zip(grads, (ds @ k_i, ds.mT @ q_i, p.mT @ dy_i), strict=True):
            out[image] = value.transpose(0, 1)
    return grads[0], grads[1], grads[2]


packed_attention_backward = torch.library.custom_op(
    "kimivl_lab::packed_attention_backward", attend_packed_backward, mutates_args=()
)


@packed_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])  # q, k, v, cu_seqlens


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*packed_attention_backward(grad, *ctx.saved_tensors), None, None, None)


packed_attention.register_autograd(_backward, setup_context=_keep_inputs)


def attention_unavailable(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the backend called `name` cannot run on `device` in `dtype`, or None when it can."""
    if name in LIBRARIES:
        return unavailable(name, device, dtype)
    if name not in ("flash_attn", "torch_varlen"):
        return None
    if device.type != "cuda":
        return f"{name} needs a CUDA device, the tower is on {device}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{name} takes bfloat16 and float16, not {dtype}"
    if torch.cuda.is_available() and (found := torch.cuda.get_device_capability(device)) < _LEAST_CAPABILITY:
        wanted = ".".join(map(str, _LEAST_CAPABILITY))
        return f"{name} needs a GPU of compute capability {wanted} (Ampere), this one has {found[0]}.{found[1]}"
    package = {"flash_attn": "flash_attn", "torch_varlen": "torch.nn.attention.varlen"}[name]
    if importlib.util.find_spec(package) is None:
        install = "pip install flash-attn --no-build-isolation" if name == "flash_attn" else "pip install 'torch>=2.10'"
        return f"{name} needs {package}, which is not installed: {install}"
    return _import_error(package)


@cache
def _import_error(package: str) -> str | None:
    """Why `package`, which is installed, cannot be imported: often it was compiled for another torch."""
    try:
        importlib.import_module(package)
    except Exception as error:  # "auto" takes another kernel, whatever is wrong with this one
        return f"{package} is installed and cannot be imported: {type(error).__name__}: {error!s:.200}"
    return None


def sdpa_runs(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """Attention of images of the given `lengths`, with one call per run of consecutive images of equal length.

    Lengths 4, 4, 6 give two calls: a batch of two images and a batch of one. Rows past the last image become zeros.
    """
    parts, start = [], 0
    for length, group in groupby(length for length in lengths if length):
        count = sum(1 for _ in group)
        batch = (
            x.narrow(0, start, count * length).unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v)
        )  # (count, heads, n, d)
        parts.append(F.scaled_dot_product_attention(*batch).transpose(1, 2).flatten(0, 1))  # (count * n, heads, d)
        start += count * length
    if len(parts) == 1 and start == q.shape[0]:
        return parts[0].contiguous()
    return torch.cat((*parts, q.new_zeros((q.shape[0] - start, *q.shape[1:]))))


def _require_int32(cu_seqlens: Tensor) -> None:
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.ndim != 1:
        raise ValueError(f"cu_seqlens must be (m + 1,) int32, got {tuple(cu_seqlens.shape)} {cu_seqlens.dtype}")
