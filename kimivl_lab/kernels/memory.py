"""Fresh memory on the host, in huge pages where it is much: handed out page by page, 4 KiB at a time, it can cost more
than computing what is written to it."""

import numpy as np
import torch
from torch import Tensor

_HUGE_PAGES_FROM = 4 * 2**20  # bytes


def empty_rows(rows: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Uninitialised (rows, dim) on the host. A large one comes from numpy, which asks for huge pages."""
    size = rows * dim * dtype.itemsize
    if size < _HUGE_PAGES_FROM:
        return torch.empty((rows, dim), dtype=dtype, device="cpu")
    return torch.from_numpy(np.empty(size, dtype=np.uint8)).view(dtype).view(rows, dim)
