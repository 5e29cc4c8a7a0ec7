"""Data parallel: every rank holds the whole tower and encodes some of the images; one collective at the end.

Every rank computes the same plan from the same host integers: which rank encodes which image, and where each feature
lands. A rank takes its own images' pixels on the host, before any copy to its device, or loads them itself. One
all-gather returns the features. It is padded to the longest rank, since gloo refuses uneven parts, and an index made on
the host leaves the padding out. A single image is broadcast by its owner instead.

Example: images of 4, 1 and 2 tokens, of which rank 0 has the first and rank 1 the others. Each rank contributes 4
tokens, rank 1 one of padding, and the index is [0, 1, 2, 3, 4, 5, 6].

Test: tests/test_parallel_ranks.py, tests/test_parallel_calls.py. Record: parallel__*.csv (variant "data").
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import MoonViTConfig
from ..geometry import Grid, GridLike, as_grid_list, patch_counts, token_counts
from ..kernels.memory import upload
from .balance import Assignment, QuadraticCost, balance_by_cost, get_dp_encoder_lb_assignment
from .calls import describe_images, same_call
from .collectives import all_gather, broadcast
from .groups import check_group

Balance = Callable[[Sequence[int], int], Assignment]
LoadPixels = Callable[[list[int]], Tensor]


class VisionTower(Protocol):
    """What data parallel needs of a tower: a call, and the device and dtype of its results. A graph runner has them."""

    @property
    def config(self) -> MoonViTConfig: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def __call__(self, pixel_values: Tensor, image_grid_hws: list[Grid], /) -> Tensor:
        """(L, 3, 14, 14) patches -> (T, 4, D), on `device` in `dtype`."""
        ...


@dataclass(frozen=True)
class DataParallelPlan:
    """Which rank encodes which image, and where its features land. Host integers only, so every rank makes the same.

    Attributes:
        by_rank: the images of each rank, in the order in which it encodes them.
        tokens: merged tokens of each image.
    """

    by_rank: list[list[int]]
    tokens: list[int]

    @classmethod
    def make(
        cls, grid_hws: Sequence[Grid], merge_kernel_size: tuple[int, int], ranks: int, balance: Balance
    ) -> "DataParallelPlan":
        """`balance` places the images by their patches; one rank keeps their order. ValueError if an image is lost."""
        tokens = token_counts(grid_hws, merge_kernel_size)
        every = list(range(len(tokens)))
        by_rank = balance(patch_counts(grid_hws), ranks).by_rank if ranks > 1 else [every]
        if len(by_rank) != ranks or sorted(image for images in by_rank for image in images) != every:
            raise ValueError(f"the balance must place each of {len(every)} images on one of {ranks} ranks: {by_rank}")
        return cls(by_rank, tokens)

    @property
    def longest(self) -> int:
        """Most tokens on one rank: what every rank's features are padded to."""
        return max(sum(self.tokens[image] for image in images) for images in self.by_rank)

    def gather_index(self) -> Tensor:
        """(T,) int64 on the host: where the tokens, in the order of the images, lie in the ranks' padded features."""
        starts, longest = [0] * len(self.tokens), self.longest
        for rank, images in enumerate(self.by_rank):
            start = rank * longest
            for image in images:
                starts[image] = start
                start += self.tokens[image]
        counts = zip(starts, self.tokens, strict=True)
        return torch.cat([torch.arange(start, start + count, device="cpu") for start, count in counts])


@torch.no_grad()
def run_dp_sharded_vision_model(
    tower: VisionTower,
    pixel_values: Tensor | None,
    grid_hws: Sequence[GridLike] | Tensor,
    group: dist.ProcessGroup,
    *,
    load_pixels: LoadPixels | None = None,
    balance: str | Balance = "cost",
    batch_id: object = None,
) -> Tensor:
    """Encodes a batch on the ranks of `group`; each calls it with the same grids and gets all features.

    Args:
        tower: whole, with the same weights on every rank. A rank without images does not call it.
        pixel_values: (L, 3, 14, 14) of all images, best on the host: a rank copies only its own to its device. Or None
            with `load_pixels`.
        load_pixels: called with the indices of this rank's images, returns their patches one image after another.
        grid_hws: (n, 2) host integers (h, w) in patches; n may be 0, or less than the ranks.
        balance: "cost" (by FLOPs), "patches" (as the engines), or a function of patches and ranks that, like these,
            gives the same on every rank.
        batch_id: a short name of the batch, such as its requests' numbers. Ranks compare it with the grids. Give it
            with `load_pixels` or pixels on a device, where the pixels themselves cannot be compared.

    Returns:
        (T, 4, D) packed features in the order of the images, on the tower's device in its dtype, at every world size;
        without gradient.

    Raises:
        ValueError: grids and pixels that do not add up, not exactly one source of pixels, an unknown balance.
        RankError: a rank did not come within the group's timeout, failed on its images, or is at another call; the
            error names it, and no rank gets features.
    """
    ranks, rank = check_group(group).size(), group.rank()
    with same_call(group) as call:
        grids = as_grid_list(grid_hws)
        plan = DataParallelPlan.make(grids, tower.config.merge_kernel_size, ranks, _resolve(balance, tower.config))
        load = _pixel_source(pixel_values, load_pixels, patch_counts(grids))
        if ranks > 1:
            call.about = describe_images("data", grids, tower.dtype, pixel_values, batch_id)
        features = _encode(tower, load, grids, plan.by_rank[rank])
    if ranks == 1 or not grids:
        return features
    if len(grids) == 1:
        owner = next(other for other, images in enumerate(plan.by_rank) if images)
        if rank != owner:
            features = features.new_empty(plan.tokens[0], *features.shape[1:])
        broadcast(features, owner, group)
        return features
    longest = plan.longest
    gathered = features.new_empty(ranks * longest, *features.shape[1:])  # rows past a rank's own are never read
    own = gathered.narrow(0, rank * longest, longest)
    own[: len(features)] = features
    all_gather(gathered, own, group)
    return gathered.index_select(0, upload(plan.gather_index(), gathered.device))


def _encode(tower: VisionTower, load: LoadPixels, grids: list[Grid], mine: list[int]) -> Tensor:
    """(own tokens, 4, D) of the images `mine`, one after another; the tower is not called for none."""
    config = tower.config
    if not mine:
        return torch.empty(0, config.merge_size, config.hidden_size, device=tower.device, dtype=tower.dtype)
    own_grids = [grids[image] for image in mine]
    features = tower(load(mine), own_grids)
    want = (sum(token_counts(own_grids, config.merge_kernel_size)), config.merge_size, config.hidden_size)
    if tuple(features.shape) != want or features.dtype != tower.dtype:
        raise ValueError(f"the tower gave {tuple(features.shape)} {features.dtype}, not {want} {tower.dtype}")
    return features.contiguous()


def _pixel_source(pixel_values: Tensor | None, load_pixels: LoadPixels | None, sizes: list[int]) -> LoadPixels:
    """What gives a rank its pixels."""
    if (pixel_values is None) == (load_pixels is None):
        raise ValueError("give exactly one of pixel_values and load_pixels")
    if load_pixels is not None:
        return load_pixels
    assert pixel_values is not None
    if len(pixel_values) != sum(sizes):
        raise ValueError(f"pixel_values hold {len(pixel_values)} patches, the grids need {sum(sizes)}")
    images = pixel_values.split(sizes) if sizes else ()  # views
    return lambda mine: images[mine[0]] if len(mine) == 1 else torch.cat([images[image] for image in mine])


def _resolve(balance: str | Balance, config: MoonViTConfig) -> Balance:
    named = {
        "cost": partial(balance_by_cost, cost=QuadraticCost.of_flops(config)),
        "patches": get_dp_encoder_lb_assignment,
    }
    if not isinstance(balance, str):
        return balance
    if balance not in named:
        raise ValueError(f"unknown balance {balance!r}: a function, or one of {', '.join(named)}")
    return named[balance]
