"""What notebook 50 runs on several ranks: `run_ranks` calls one of these functions on every rank.

The functions stand in a module because another process can import a module, but not a cell of a notebook.

Test: tests/test_parallel_lessons.py.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..bench.fit_cost_model import CollectivePoint, MeasuredPoint
from ..config import KimiVLConfig, MoonViTConfig
from ..geometry import Grid, patch_counts
from ..kimi_vl.encoder import KimiVLEncoder
from ..measure.accuracy import relative_error
from ..measure.ranks import time_on_ranks
from ..measure.timing import Timing
from ..moonvit.model import MoonVitPretrainedModel
from ..parallel.balance import QuadraticCost, balance_by_cost, get_dp_encoder_lb_assignment, round_robin_assignment
from ..parallel.collectives import Collective, all_gather, all_reduce, broadcast, record_collectives
from ..parallel.data_parallel import run_dp_sharded_vision_model
from ..parallel.groups import RankError, init_group
from ..parallel.linear import RowParallelLinear
from ..parallel.tensor_parallel import tensor_parallel


@dataclass(frozen=True)
class Encoded:
    """One batch, as one rank saw it.

    Attributes:
        error: relative, of all features to those of the whole encoder on one rank.
        patches: that went through this rank's blocks.
        collectives: in their order.
    """

    error: float
    patches: int
    collectives: list[Collective]


@torch.no_grad()
def encode_in_modes(config: KimiVLConfig, grids: list[Grid], modes: Sequence[str]) -> dict[str, Encoded]:
    """Mode (of `ENCODER_PARALLEL`) -> what came of a batch of noise."""
    group, whole, pixels, found = init_group(), _encoder(config), _noise(grids, seed=0), {}
    alone = whole.get_image_features(pixels, grids)
    for mode in modes:
        encoder = copy.deepcopy(whole).set_encoder_parallel(mode, group)
        patches = _lengths_through(encoder.vision_tower.encoder)
        with record_collectives() as collectives:
            features = encoder.get_image_features(pixels, grids)
        found[mode] = Encoded(relative_error(features, alone), sum(patches), collectives)
    return found


@dataclass(frozen=True)
class Waited:
    """What became of a rank that waited for others in vain.

    Attributes:
        missing: the ranks that did not come.
        words: the error's, less those of the library below.
    """

    missing: list[int]
    words: str


@torch.no_grad()
def encode_in_halves(
    config: KimiVLConfig, grids: list[Grid], busy: Sequence[bool], over_all: bool, timeout_s: float
) -> float | Waited | None:
    """Half of the ranks share one encoder, tensor parallel, the other half another; either has images of its own.

    Args:
        busy: whether the first half has images, and the second.
        over_all: the fault: layers are cut over a half, their sums go over all ranks.
        timeout_s: the longest that a rank waits in a collective.

    Returns:
        The relative error of this rank's features; what ended its wait; or None, it had no images.
    """
    world, timeout = init_group(), timedelta(seconds=timeout_s)
    everyone, (half, _) = dist.new_group(timeout=timeout), dist.new_subgroups(world.size() // 2, timeout=timeout)
    number = world.rank() // half.size()
    pixels, outcome = _noise(grids, seed=number), None
    encoder = _encoder(config).set_encoder_parallel("tensor", half)
    for layer in encoder.modules():
        if over_all and isinstance(layer, RowParallelLinear):
            layer.group = everyone
    if busy[number]:
        try:
            features = encoder.get_image_features(pixels, grids)
            outcome = relative_error(features, _encoder(config).get_image_features(pixels, grids))
        except RankError as error:
            outcome = Waited(error.missing, str(error).partition(" (")[0])
    dist.barrier(world)  # who has nothing to do stays until the others are done
    return outcome


@torch.no_grad()
def time_modes(
    config: MoonViTConfig, batches: Sequence[list[Grid]], modes: Sequence[str], repeats: int
) -> list[dict[str, tuple[MeasuredPoint, Timing]]]:
    """For every batch, mode -> its median and its spread.

    Args:
        modes: "single", "tensor", "data", or, to place the images as another balance does, "data, by patches" or
            "data, round robin".
    """
    group, measured = init_group(), []
    torch.manual_seed(0)
    tower = MoonVitPretrainedModel(config).eval()
    cut = tensor_parallel(copy.deepcopy(tower), group)
    by_cost = partial(balance_by_cost, cost=QuadraticCost.of_flops(config))
    balances = {
        "data": by_cost,
        "data, by patches": get_dp_encoder_lb_assignment,
        "data, round robin": round_robin_assignment,
    }
    for grids in batches:
        pixels, sizes = _noise(grids, seed=0), patch_counts(grids)
        runs: dict[str, Callable[[], object]] = {
            "single": partial(tower, pixels, grids) if group.rank() == 0 else lambda: None,
            "tensor": partial(cut, pixels, grids),
        }
        for name, balance in balances.items():
            runs[name] = partial(run_dp_sharded_vision_model, tower, pixels, grids, group, balance=balance)
        timed = time_on_ranks({mode: runs[mode] for mode in modes}, group, torch.device("cpu"), repeats=repeats)
        points = {}
        for mode, timing in timed.items():
            ranks = 1 if mode == "single" else group.size()
            by_rank = balances[mode](sizes, ranks).by_rank if mode in balances else None
            seconds = timing.latency.p50_ms / 1e3
            points[mode] = MeasuredPoint(mode.partition(",")[0], sizes, ranks, seconds, by_rank), timing.latency
        measured.append(points)
    return measured


def time_collectives(sizes: Sequence[int], repeats: int) -> list[CollectivePoint]:
    """Every kind of collective that leaves each of `sizes` bytes on every rank."""
    group, points = init_group(), []
    for size in sizes:
        whole = torch.zeros(size // 4, device="cpu")
        own = torch.zeros(len(whole) // group.size(), device="cpu")
        runs = {
            "all_reduce": partial(all_reduce, whole, group),
            "all_gather": partial(all_gather, whole, own, group),
            "broadcast": partial(broadcast, whole, 0, group),
        }
        for kind, timing in time_on_ranks(runs, group, torch.device("cpu"), repeats=repeats).items():
            points.append(CollectivePoint(kind, group.size(), whole.nbytes, timing.latency.p50_ms / 1e3))
    return points


def _encoder(config: KimiVLConfig) -> KimiVLEncoder:
    """The same on every rank, with biases: new ones are 0, and one that is added twice would not show."""
    torch.manual_seed(0)
    encoder = KimiVLEncoder(config).eval()
    for name, parameter in encoder.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(std=0.1)
    return encoder


def _lengths_through(module: nn.Module) -> list[int]:
    """A list that fills with the length of what the module is called on."""
    lengths: list[int] = []
    module.register_forward_pre_hook(lambda _, inputs: lengths.append(len(inputs[0])))
    return lengths


def _noise(grids: Sequence[Grid], seed: int) -> Tensor:
    """(L, 3, 14, 14), different in every patch."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(patch_counts(grids)), 3, 14, 14, generator=generator, device="cpu")
