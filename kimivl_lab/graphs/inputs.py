"""The inputs that graphs read: one set of buffers, of which each budget uses the first rows.

A replay of L patches in a graph of R rows:

    pixel_values      | images 0..L | zeros        |    what follows row L is cleared only as far as an earlier
    pos_embeds        | images 0..L | zeros        |    replay has left something there
    rope_cos_sin      | images 0..L | zeros        |
    merge_gather_idx  | 0..L        | zeros        |
    cu_seqlens        0 ... L L L R                     unused slots repeat the total; the last one is the padding's

The padded rows are a segment of their own, so every row is written by every operator and no attention crosses.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..kernels.memory import upload

_OFFSETS = "cu_seqlens"


class StaticInputs:
    """Args:
    buffers: by name, zeros; (rows, ...) each, but the offsets (slots + 1,).
    """

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        self.buffers = dict(buffers)
        self._written = 0  # rows that may hold something

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def first(self, rows: int) -> dict[str, Tensor]:
        """What a graph of `rows` patches reads: views of the buffers, and offsets of equal images for its capture."""
        slots = len(self.buffers[_OFFSETS]) - 1
        equal = torch.tensor([rows * slot // slots for slot in range(slots + 1)], dtype=torch.int32)
        self.buffers[_OFFSETS].copy_(equal)
        return {name: value if name == _OFFSETS else value[:rows] for name, value in self.buffers.items()}

    def write(self, values: Mapping[str, Tensor], rows: int) -> None:
        """Copies `values` of L <= `rows` patches to the front and clears what is stale up to `rows`."""
        used, stale = values["pixel_values"].shape[0], min(self._written, rows)
        for name, buffer in self.buffers.items():
            value = upload(values[name], buffer.device)
            if name == _OFFSETS:
                buffer.copy_(value)
                buffer[-1:].fill_(rows)
                continue
            buffer[:used].copy_(value)
            if stale > used:
                buffer[used:stale].zero_()
        self._written = used if self._written <= rows else self._written

    def poison(self, rows: int) -> None:
        """Fills the padding of a replay that has just been written with NaN."""
        used = int(self.buffers[_OFFSETS][-2])
        for buffer in self.buffers.values():
            if buffer.is_floating_point():
                buffer[used:rows].fill_(float("nan"))
        self._written = max(self._written, rows)
