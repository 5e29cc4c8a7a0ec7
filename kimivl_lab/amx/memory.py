"""Memory that the kernels work in and on."""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes, a cache line and a row of a tile


class _Kept(threading.local):
    memory: Tensor | None = None


_kept = _Kept()


def aligned(numbers: int, dtype: torch.dtype) -> Tensor:
    """(numbers,) of `dtype` on the host, uninitialised, at an address that is a multiple of 64."""
    size = dtype.itemsize
    memory = torch.empty(numbers + _ALIGNMENT // size, dtype=dtype)
    skip = -memory.data_ptr() % _ALIGNMENT // size
    return memory[skip : skip + numbers]


def scratch(nbytes: int) -> Tensor:
    """At least `nbytes`, aligned, of this thread's own: kept from call to call, and grown."""
    if _kept.memory is None or _kept.memory.numel() < nbytes:
        _kept.memory = aligned(nbytes, torch.uint8)
    return _kept.memory


def check(name: str, tensor: Tensor, shape: Sequence[int]) -> None:
    """ValueError unless `tensor`, called `name`, is `shape` in bfloat16 on the host: the kernels read by address."""
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype != torch.bfloat16 or tensor.device.type != "cpu":
        raise ValueError(
            f"{name} must be {tuple(shape)} torch.bfloat16 on the CPU, got {tuple(tensor.shape)} {tensor.dtype} on "
            f"{tensor.device}"
        )
