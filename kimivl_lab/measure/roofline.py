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


def copy_gbps(device: torch.device | str = "cpu", mib: float = 256) -> float:
    """Achieved GB/s of a copy between warm buffers of `mib` MiB each, bytes read plus bytes written.

    The default is the rate of a GPU's memory or of a CPU's: see `copy_mib`. Smaller buffers may fit in a cache, whose
    rate is higher; `copy_gbps_of` measures it at the size of the work that is held against it.
    """
    source = torch.ones(max(1, int(copy_mib(device, mib) * 2**20) // 4), device=device)
    return _copy_gbps(source, device)


def copy_gbps_of(bytes_moved: int, device: torch.device | str = "cpu") -> float:
    """Achieved GB/s of a copy that reads and writes `bytes_moved` bytes in all, at most 512 MiB.

    It is the roof of an operator that moves so few bytes. A GPU's second-level cache holds 50 MB on an H100 and H200:
    what fits there is copied faster than memory allows, and repeated work of that size is faster, too. For a few KB
    the time to start a kernel is most of it, which no operator avoids either.
    """
    numbers = max(1, min(bytes_moved, 2**29) // 8)  # float32: 4 bytes read and 4 written
    return _copy_gbps(torch.ones(numbers, device=device), device)


def copy_mib(device: torch.device | str, mib: float) -> float:
    """`mib`, or the size of the GPU's second-level cache twice, if that is more: two such buffers do not fit in it."""
    if torch.device(device).type != "cuda" or mib < 64:  # small sizes are asked for on purpose
        return mib
    return max(mib, 2 * getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) / 2**20)


def _copy_gbps(source: Tensor, device: torch.device | str) -> float:
    target = torch.empty_like(source).copy_(source)
    timing = time_interleaved({"copy": lambda: target.copy_(source)}, device=device, warmup=3, repeats=10)
    return 2 * source.nbytes / timing["copy"].p20_ms / 1e6


def floor_ms(bytes_moved: float, gbps: float) -> float:
    """Least time to move `bytes_moved` at `gbps`."""
    return bytes_moved / gbps / 1e6
