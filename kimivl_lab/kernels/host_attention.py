"""Packed attention by our kernels in C: softmax(q k^T / sqrt(d)) v of every image. No score is written to memory.

`amx/attention.c` computes in bfloat16. `simd/attention.c` takes float32 and bfloat16 and computes both in float32, for
torch's attention in bfloat16 takes longer even where the processor has bfloat16 products (attention__*__bfloat16__*).

Test: tests/test_amx.py, tests/test_simd.py. Record: attention__*.csv.
"""

import ctypes

import torch
from torch import Tensor

from ..checks import segment_lengths
from .library import LIBRARIES, library, require_host
from .memory import empty_rows, scratch

_Strides = ctypes.c_int64 * 6


def attend(name: str, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """q, k, v (L, heads, d), offsets (m + 1,) int32, all on the host -> (L, heads, d), contiguous.

    Rows past the last offset are not read and become zeros.

    Args:
        name: "amx" for bfloat16, "simd" for float32 and bfloat16.

    Raises:
        ValueError: operands of other shapes or dtypes, or that want a gradient; offsets that do not rise from 0 to at
            most L; an image longer than `max_seqlen`.
        BuildError: there are no such kernels on this machine.
    """
    kernels, dtypes = library(name), LIBRARIES[name].dtypes
    dtype = q.dtype if q.dtype in dtypes else dtypes[0]
    rows, heads, d = q.shape
    for operand, x in (("q", q), ("k", k), ("v", v)):
        require_host(operand, x, q.shape, dtype)
    require_host("cu_seqlens", cu_seqlens, cu_seqlens.shape[:1], torch.int32)
    if not heads or not d:
        raise ValueError(f"there must be heads with channels, got {heads} heads of {d}")
    offsets = cu_seqlens.tolist()  # checked in every call: the kernel reads by address
    longest = max(segment_lengths(offsets, rows, max_seqlen), default=0)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    cu_seqlens = cu_seqlens.contiguous()
    out = empty_rows(rows, heads * d, q.dtype).view(q.shape)
    out[offsets[-1] :].zero_()
    threads, each = torch.get_num_threads(), kernels.attention_scratch(longest, d)
    inputs = (*(x.data_ptr() for x in (q, k, v)), _Strides(*(x.stride(axis) for x in (q, k, v) for axis in (0, 1))))
    sizes = (len(offsets) - 1, heads, d, d**-0.5, q.element_size())
    memory = (threads, scratch(threads * each).data_ptr(), each)
    if kernels.attention(*inputs, out.data_ptr(), cu_seqlens.data_ptr(), *sizes, *memory):
        raise MemoryError("packed attention: no memory for its list of tasks")
    return out
