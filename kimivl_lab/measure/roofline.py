"""The rates of this machine: matrix products and copies, measured in the run whose numbers they bound.

Test: tests/test_benchmarks.py.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .timing import Timing, time_interleaved


def matmul(dtype: torch.dtype, device: torch.device | str = "cpu", size: int | None = None) -> Callable[[], Tensor]:
    """A large square matrix product to time: 2048 rows on a CPU, 8192 on a GPU, unless `size` says otherwise."""
    size = size or _matmul_size(device)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def matmul_tflops(timing: Timing, device: torch.device | str = "cpu", size: int | None = None) -> float:
    """TFLOP/s of `matmul`'s product, by its fast runs (the 20th percentile)."""
    return 2 * (size or _matmul_size(device)) ** 3 / timing.p20_ms / 1e9


def matmul_peak_tflops(dtype: torch.dtype, device: torch.device | str = "cpu", size: int | None = None) -> float:
    """Achieved TFLOP/s of that product alone."""
    timing = time_interleaved({"matmul": matmul(dtype, device, size)}, device=device, warmup=3, repeats=10)
    return matmul_tflops(timing["matmul"], device, size)


def _matmul_size(device: torch.device | str) -> int:
    return 8192 if torch.device(device).type == "cuda" else 2048


def copy_gbps(device: torch.device | str = "cpu", mib: int = 256) -> float:
    """Achieved GB/s of a large copy between warm buffers, bytes read plus bytes written."""
    source = torch.ones(mib * 2**20 // 4, device=device)
    target = torch.empty_like(source).copy_(source)
    timing = time_interleaved({"copy": lambda: target.copy_(source)}, device=device, warmup=3, repeats=10)
    return 2 * source.nbytes / timing["copy"].p20_ms / 1e6


def floor_ms(bytes_moved: float, gbps: float) -> float:
    """Least time to move `bytes_moved` at `gbps`."""
    return bytes_moved / gbps / 1e6
