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
    memory = torch.empty(numbers + _ALIGNMENT // size, dtype=dtype, device="cpu")
    skip = -memory.data_ptr() % _ALIGNMENT // size
    return memory[skip : skip + numbers]


def scratch(nbytes: int) -> Tensor:
    """At least `nbytes`, aligned, of this Python thread's own: kept from call to call, and grown.

    Attention takes the most, 1.4 MiB for each of torch's threads at 4,096 patches of head size 72.
    """
    if _kept.memory is None or _kept.memory.numel() < nbytes:
        _kept.memory = aligned(nbytes, torch.uint8)
    return _kept.memory


def check(name: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> None:
    """ValueError unless `tensor`, called `name`, is plain memory on the host of that shape and dtype, and wants no
    gradient: the kernels read by address, and have no backward."""
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        raise ValueError(f"{name} must be a plain tensor, got a {type(tensor).__name__}")
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype or tensor.device.type != "cpu":
        raise ValueError(
            f"{name} must be {tuple(shape)} {dtype} on the CPU, got {tuple(tensor.shape)} {tensor.dtype} on "
            f"{tensor.device}"
        )
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} wants a gradient, which this kernel does not give: call it under torch.no_grad()")
