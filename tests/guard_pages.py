"""Runs packed attention between pages that may not be touched: a read or write outside its memory ends the process.

    python -m tests.guard_pages simd

Operands, result and scratch lie against a forbidden page at their end, then at their start. Prints the instruction set.
"""

import ctypes
import mmap
import sys

import torch

from kimivl_lab.kernels import host_attention, library

libc, PAGE, kept = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE, []
libc.mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


def guarded(numbers, dtype, at_end, align=4):
    """(numbers,) between two forbidden pages: against the last one, or right behind the first."""
    size = -(-numbers * dtype.itemsize // align) * align
    pages = -(-size // PAGE)
    block = mmap.mmap(-1, (pages + 2) * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(block))
    kept.append(block)
    for page in (0, pages + 1):
        assert libc.mprotect(start + page * PAGE, PAGE, 0) == 0
    skip = PAGE + (pages * PAGE - size if at_end else 0)
    return torch.frombuffer(block, dtype=dtype, count=numbers, offset=skip)


@torch.no_grad()
def attend_all(name, dtype, at_end):
    """Images of 1 to 300 patches."""
    vars(host_attention)["scratch"] = lambda nbytes: guarded(nbytes, torch.uint8, at_end, 64)
    vars(host_attention)["empty_rows"] = lambda rows, dim, dtype: guarded(rows * dim, dtype, at_end).view(rows, dim)
    for n in range(1, 301):
        for d in (72, 20) if n < 60 else (72,):
            q, k, v = (guarded(n * 2 * d, dtype, at_end).copy_(torch.randn(n * 2 * d)).view(n, 2, d) for _ in "qkv")
            offsets = guarded(2, torch.int32, at_end).copy_(torch.tensor([0, n]))
            assert host_attention.attend(name, q, k, v, offsets, n).isfinite().all()
            kept.clear()


if __name__ == "__main__":
    for dtype in library.LIBRARIES[sys.argv[1]].dtypes:
        attend_all(sys.argv[1], dtype, at_end=True)
        attend_all(sys.argv[1], dtype, at_end=False)
    print(library.kernel_isa(sys.argv[1]))
