"""Memory of recorded programs on a CPU: blocks that stay where they are, given back and taken again, never released.

All programs of one backend share a pool, since only one of them runs at a time: whoever is recorded later overwrites
what the others left. The largest goes first, so that the others find room in its blocks.
"""

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes


class MemoryPool:
    """Blocks of host memory, (n,) uint8 each."""

    def __init__(self) -> None:
        self.blocks: list[Tensor] = []
        self._free: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    def reuse(self) -> None:
        """Every block is free again: another program begins."""
        self._free = list(self.blocks)

    def take(self, nbytes: int) -> Tensor:
        """The smallest free block of at least `nbytes`, or a new one."""
        fitting = [index for index, block in enumerate(self._free) if block.nbytes >= nbytes]
        if fitting:
            return self._free.pop(min(fitting, key=lambda index: self._free[index].nbytes))
        block = torch.zeros(max(1, -(-nbytes // _ALIGNMENT)) * _ALIGNMENT, dtype=torch.uint8)
        self.blocks.append(block)
        return block

    def give_back(self, block: Tensor) -> None:
        self._free.append(block)

    def poison(self) -> None:
        """Fills all blocks with NaN."""
        for block in self.blocks:
            block.view(torch.float32).fill_(float("nan"))
