"""The rates of this machine: matrix products and copies, measured in the run whose numbers they bound.

The product is the fastest that runs here: torch's, or one of the packed products that the tower uses. On some
processors torch's product in float32 uses half of the vectors' width.

Test: tests/test_benchmarks.py.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..kernels.packed_linear import PACKED_KERNELS, packed_unavailable
from .timing import Timing, time_interleaved


def matmul(dtype: torch.dtype, device: torch.device | str = "cpu", size: int | None = None) -> Callable[[], Tensor]:
    """A large square matrix product to time: 2048 rows on a CPU, 8192 on a GPU, unless `size` says otherwise.

    On a CPU each product that runs here is tried, and the fastest is returned.
    """
    size = size or _matmul_size(device)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    products: list[Callable[[], Tensor]] = [lambda: torch.mm(a, b, out=out)]
    for name, kernel in PACKED_KERNELS.items():
        if packed_unavailable(name, torch.device(device), dtype) is None:
            products.append(partial(kernel.multiply, a, kernel.pack(b), size, None, None, False))
    return _fastest(products)


def _fastest(products: Sequence[Callable[[], Any]], repeats: int = 3) -> Callable[[], Any]:
    """By the shortest of some runs; the first is a warm-up."""

    def seconds(run: Callable[[], Any]) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    if len(products) == 1:
        return products[0]
    return min(products, key=lambda run: min([seconds(run) for _ in range(1 + repeats)][1:]))


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
