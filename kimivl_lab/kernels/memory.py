"""Memory that kernels read and write: uninitialised host memory, scratch space, and copies to the device.

`empty_rows` and `aligned` allocate host memory, `scratch` lends one block per thread, `upload` and `PackedArrays` copy
host data to a device without making the host wait.

Why copies start in pinned memory: the driver copies ordinary, pageable memory only after staging it, and the host may
wait for that. Pinned memory is copied while the host continues, so it must not be rewritten before the copy has run.
`upload` therefore takes fresh pinned memory in every call. torch records an event behind the copy and reuses freed
pinned memory only after this event has passed, so torch's own store is the ring of buffers that other programs keep.
The store is empty at first and after each capture of a CUDA graph. What it lacks comes from the driver, which pins
pages and may wait for the device, unseen by `HostSyncCounter`. `reserve_pinned` fills it ahead of the first request; a
runner calls it after its captures. What remains is the host's own copy into pinned memory, one thread's: a caller that
gives a pinned tensor saves it.

Test: tests/test_metadata_upload.py. Record: metadata__*.csv.
"""

import math
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16  # bytes; the widest load of a GPU kernel
_CACHE_LINE = 64  # bytes; also one row of an AMX tile
_HUGE_PAGES_FROM = 4 * 2**20  # bytes

_of_this_thread = threading.local()

Layout = Mapping[str, tuple[tuple[int, ...], type[np.generic]]]


def empty_rows(rows: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Allocates an uninitialised (rows, dim) tensor on the host.

    Large blocks come from numpy, which requests huge pages: mapping 4 KiB pages one by one can cost more than computing
    the contents.
    """
    size = rows * dim * dtype.itemsize
    if size < _HUGE_PAGES_FROM:
        return torch.empty((rows, dim), dtype=dtype, device="cpu")
    return torch.from_numpy(np.empty(size, dtype=np.uint8)).view(dtype).view(rows, dim)


def aligned(numbers: int, dtype: torch.dtype) -> Tensor:
    """Allocates (numbers,) of `dtype` on the host, uninitialised, at an address that is a multiple of 64."""
    size = dtype.itemsize
    memory = torch.empty(numbers + _CACHE_LINE // size, dtype=dtype, device="cpu")
    skip = -memory.data_ptr() % _CACHE_LINE // size
    return memory[skip : skip + numbers]


def scratch(nbytes: int) -> Tensor:
    """Returns at least `nbytes` of aligned working memory, the same block in every call of one Python thread.

    The contents are undefined. Attention in float32 needs the most: 2.4 MiB for each of torch's threads at 4,096
    patches of head size 72.
    """
    block: Tensor | None = getattr(_of_this_thread, "block", None)
    if block is None or block.numel() < nbytes:
        block = _of_this_thread.block = aligned(nbytes, torch.uint8)
    return block


def upload(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copies `tensor` to `device`; from the host to a CUDA device the host does not wait for the copy.

    A tensor that is already pinned is copied from where it lies, so its owner must not change it before the copy has
    run. A tensor that is already on `device` is returned unchanged.
    """
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda" and not tensor.is_pinned():
        tensor = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    return tensor.to(device, non_blocking=True)


def reserve_pinned(nbytes: int, copies: int = 2) -> list[int]:
    """Makes pinned memory for later uploads of up to `nbytes` bytes, so that they wait for no allocation.

    Use it once, before the first request, on a machine with a GPU; without one nothing is done. torch keeps blocks of
    powers of two, so `copies` of each power up to the first that holds `nbytes` are allocated and given back: about
    `4 * copies * nbytes` bytes at most. More uploads at a time than `copies` allocate as before.

    Returns:
        The sizes in bytes. Example: 5 bytes and 2 copies give [1, 1, 2, 2, 4, 4, 8, 8].
    """
    if not torch.cuda.is_initialized():
        return []
    powers = range(max(nbytes - 1, 0).bit_length() + 1)
    sizes = [2**power for power in powers for _ in range(copies)]
    # All together: a block that is given back at once would be handed out again for the next copy.
    blocks = [torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True) for size in sizes]
    return [block.nbytes for block in blocks]


class PackedArrays:
    """Host arrays of several types in one buffer, so that one copy moves all of them.

    Each array starts at a multiple of `ALIGNMENT` bytes. Example: {"a": ((3,), np.int32), "b": ((2,), np.int64)} gives
    one buffer of 32 bytes, with "a" at byte 0 and "b" at byte 16.

    Args:
        layout: (shape, dtype) of each array by its name.

    `arrays` holds the arrays by name, uninitialised: fill them before `to`.
    """

    def __init__(self, layout: Layout) -> None:
        self._starts: dict[str, int] = {}
        end = 0
        for name, (shape, dtype) in layout.items():
            self._starts[name] = -(-end // ALIGNMENT) * ALIGNMENT
            end = self._starts[name] + math.prod(shape) * np.dtype(dtype).itemsize
        self._buffer = np.empty(end, dtype=np.uint8)
        self.arrays: dict[str, np.ndarray[Any, Any]] = {
            name: np.ndarray(shape, dtype, self._buffer, self._starts[name]) for name, (shape, dtype) in layout.items()
        }

    def to(self, device: torch.device | str) -> dict[str, Tensor]:
        """Returns the arrays as tensors on `device`, all of them views of one buffer (on the CPU: of this buffer)."""
        buffer = upload(torch.from_numpy(self._buffer), device)
        tensors = {}
        for name, array in self.arrays.items():
            like = torch.from_numpy(array)
            tensors[name] = buffer.narrow(0, self._starts[name], array.nbytes).view(like.dtype).view(like.shape)
        return tensors
