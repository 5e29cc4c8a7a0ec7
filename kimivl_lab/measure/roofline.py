"""What this machine can do: matrix products and copies, measured in the run whose numbers they bound."""

import torch

from .timing import time_interleaved


def matmul_peak_tflops(dtype: torch.dtype, device: torch.device | str = "cpu", size: int | None = None) -> float:
    """Achieved TFLOP/s of a large square matrix product, the best of its repeats.

    Args:
        size: rows and columns; by default 2048 on a CPU, 8192 on a GPU.
    """
    device = torch.device(device)
    size = size or (8192 if device.type == "cuda" else 2048)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    timing = time_interleaved({"matmul": lambda: torch.mm(a, b, out=out)}, device=device, warmup=3, repeats=10)
    return 2 * size**3 / timing["matmul"].p20_ms / 1e9


def copy_gbps(device: torch.device | str = "cpu", mib: int = 256) -> float:
    """Achieved GB/s of a large copy between warm buffers, bytes read plus bytes written."""
    source = torch.ones(mib * 2**20 // 4, device=device)
    target = torch.empty_like(source).copy_(source)
    timing = time_interleaved({"copy": lambda: target.copy_(source)}, device=device, warmup=3, repeats=10)
    return 2 * source.nbytes / timing["copy"].p20_ms / 1e6


def floor_ms(bytes_moved: float, gbps: float) -> float:
    """Least time to move `bytes_moved` at `gbps`."""
    return bytes_moved / gbps / 1e6
