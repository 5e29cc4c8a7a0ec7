"""What a tower computes and what its ranks send, by formula: FLOPs and bytes, no seconds.

Tensor parallel sums two activations of L x D in every layer: 54 all-reduces a forward at full size. Data parallel
gathers the features once, T x 4 x D = L x D.

A ring of R ranks passes a tensor on in R - 1 steps; an all-reduce does so twice, to reduce and then to gather, in
pieces of 1/R. A broadcast goes down a binary tree.

Test: tests/test_cost_model.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..config import MoonViTConfig
from ..moonvit.flops import tower_flops
from .tensor_parallel import tensor_parallel_sizes

COLLECTIVES = ("all_reduce", "all_gather", "broadcast")


@dataclass(frozen=True)
class TowerWork:
    """FLOPs and bytes of one tower, all layers together.

    Attributes:
        linear_flops: of one patch in the blocks' linear layers.
        attention_flops: of one pair of patches; an image of n patches has n^2.
        itemsize: bytes of one number in the tower's dtype.
        tensor_parallel_sizes: world sizes that the tower can be cut over.
    """

    layers: int
    hidden_size: int
    linear_flops: int
    attention_flops: int
    itemsize: int
    tensor_parallel_sizes: tuple[int, ...]

    @classmethod
    def of(cls, config: MoonViTConfig, dtype: torch.dtype) -> "TowerWork":
        flops = tower_flops(config, [(1, 1)])
        return cls(
            layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            linear_flops=flops["linear"],
            attention_flops=flops["attention"],
            itemsize=dtype.itemsize,
            tensor_parallel_sizes=tuple(tensor_parallel_sizes(config)),
        )

    @property
    def all_reduces(self) -> int:
        """Of one tensor-parallel forward: after wo and after fc1 of every layer."""
        return 2 * self.layers

    def activation_bytes(self, patches: int) -> int:
        """Of (patches, D) numbers: what an all-reduce sums, and as (patches / 4, 4, D) what a rank gathers."""
        return patches * self.hidden_size * self.itemsize

    def tensor_parallel_bytes(self, sizes: Sequence[int]) -> int:
        """Of all tensors that the all-reduces of one forward sum. `sizes`: patches of each image."""
        return self.all_reduces * self.activation_bytes(sum(sizes))

    def data_parallel_bytes(self, sizes: Sequence[int], by_rank: Sequence[Sequence[int]]) -> int:
        """Of the tensor that the one collective of a forward leaves on every rank.

        The image itself when there is one; else every rank's features padded to those of the longest.

        Args:
            sizes: patches of each image.
            by_rank: the images of each rank (`Assignment.by_rank`).
        """
        if len(sizes) == 1:
            return self.activation_bytes(sizes[0])
        longest = max(sum(sizes[image] for image in images) for images in by_rank)
        return len(by_rank) * self.activation_bytes(longest)


def steps_and_bytes(kind: str, ranks: int, size: int) -> tuple[int, float]:
    """(steps one after another, bytes that the busiest rank sends) of a collective; (0, 0) on one rank.

    An all-reduce of 24 bytes on 4 ranks takes 6 steps, in which each rank sends 36 bytes.

    Args:
        kind: one of `COLLECTIVES`.
        size: bytes of the tensor that it leaves on every rank.
    """
    if kind not in COLLECTIVES:
        raise ValueError(f"unknown collective {kind!r}: one of {', '.join(COLLECTIVES)}")
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    if kind == "all_reduce":
        return 2 * (ranks - 1), 2 * (ranks - 1) / ranks * size
    if kind == "all_gather":
        return ranks - 1, (ranks - 1) / ranks * size
    levels = (ranks - 1).bit_length()
    return levels, levels * size
