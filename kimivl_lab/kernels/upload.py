"""From the host to the device without waiting: one copy from pinned memory, asked not to block.

A copy from ordinary, pageable memory blocks; asked not to, the driver stages it and may wait for the stream first.
Pinned memory is copied while the host goes on, so it must not be rewritten before the copy has run. `upload` takes
fresh pinned memory in every call: once freed, torch's allocator hands it out again only when the event that it recorded
behind the copy has passed.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16  # bytes; the widest load of a kernel

Layout = Mapping[str, tuple[tuple[int, ...], type[np.generic]]]


def upload(tensor: Tensor, device: torch.device | str) -> Tensor:
    """`tensor` on `device`; from the host to a CUDA device by one copy that the host does not wait for.

    A tensor that lies in pinned memory already is copied from there: its owner must leave it alone until then.
    """
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda" and not tensor.is_pinned():
        tensor = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    return tensor.to(device, non_blocking=True)


class PackedArrays:
    """Host arrays of several types in one buffer, each at a multiple of `ALIGNMENT` bytes: one copy takes them all.

    Args:
        layout: (shape, dtype) of each array by its name.

    `arrays` are views to fill; undefined until then.
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

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer, gaps included."""
        return self._buffer.nbytes

    def to(self, device: torch.device | str) -> dict[str, Tensor]:
        """The arrays as tensors on `device`: views of one buffer, on the host of the one that was filled."""
        buffer = upload(torch.from_numpy(self._buffer), device)
        tensors = {}
        for name, array in self.arrays.items():
            like = torch.from_numpy(array)
            tensors[name] = buffer.narrow(0, self._starts[name], array.nbytes).view(like.dtype).view(like.shape)
        return tensors
