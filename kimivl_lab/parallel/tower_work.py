"""What a tower computes and sends, by formula: FLOPs and bytes, no seconds.

Tensor parallel sums two activations of L x D in every layer: 54 all-reduces a forward at full size. Data parallel
gathers the features once, T x 4 x D = L x D.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..config import MoonViTConfig
from ..moonvit.flops import tower_flops


@dataclass(frozen=True)
class TowerWork:
    """All layers together.

    Attributes:
        linear_flops: of one patch in the blocks' linear layers.
        attention_flops: of one pair of patches; an image of n patches has n^2.
        itemsize: bytes of one number in the tower's dtype.
    """

    layers: int
    heads: int
    hidden_size: int
    intermediate_size: int
    linear_flops: int
    attention_flops: int
    itemsize: int

    @classmethod
    def of(cls, config: MoonViTConfig, dtype: torch.dtype) -> "TowerWork":
        flops = tower_flops(config, [(1, 1)])
        return cls(
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            linear_flops=flops["linear"],
            attention_flops=flops["attention"],
            itemsize=dtype.itemsize,
        )

    @property
    def all_reduces(self) -> int:
        """Of one tensor-parallel forward: after wo and after fc1 of every layer."""
        return 2 * self.layers

    def divides_by(self, ranks: int) -> bool:
        """Whether tensor parallel can run on `ranks`: whole heads and whole columns of the MLP to each."""
        return ranks > 0 and self.heads % ranks == 0 and self.intermediate_size % ranks == 0

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
