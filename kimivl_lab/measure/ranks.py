"""Timing on several ranks at once: variants in turn, every run from a barrier, and the slowest rank counts.

What a rank waits for in a collective is of two kinds: the transfer, and the ranks that come later. The last one to come
waits for the transfer only, so the least over the ranks is the transfer, and the spread of the ranks' own work, the
skew, is the rest.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ..parallel.collectives import record_collectives
from .timing import Timing, round_orders

_SPLIT_ROUNDS = 2  # counting collectives waits for each, so these rounds are not among the timed ones


@dataclass(frozen=True)
class RankTiming:
    """One variant on all ranks; times in milliseconds, medians over rounds.

    Attributes:
        latency: of the slowest rank.
        compute_ms: the slowest rank's own work.
        skew_ms: by how much the slowest rank's own work exceeds the fastest's.
        collective_ms: in collectives, less the wait for later ranks.
        collectives, bytes: how many in one run, and of what size together (see `Collective.bytes`).
    """

    latency: Timing
    compute_ms: float
    skew_ms: float
    collective_ms: float
    collectives: int
    bytes: int

    def row(self) -> dict[str, Any]:
        """The columns of a record."""
        return {
            **self.latency.row(),
            "compute_ms": round(self.compute_ms, 4),
            "skew_ms": round(self.skew_ms, 4),
            "collective_ms": round(self.collective_ms, 4),
            "collective_count": self.collectives,
            "collective_bytes": self.bytes,
        }


def time_on_ranks(
    variants: Mapping[str, Callable[[], object]],
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    repeats: int = 5,
) -> dict[str, RankTiming]:
    """Runs each variant `repeats` times on all ranks of `group`; every rank gets the same result.

    Every round runs all variants in a new random order, the same order on every rank (see `measure.timing`).

    There is no warm-up: the check before it is one.

    Args:
        variants: the same names in the same order on every rank; a rank without work passes a function that returns.
    """
    names = list(variants)
    rounds: dict[str, list[float]] = {name: [] for name in names}
    splits: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    counts: dict[str, tuple[int, int]] = {}
    orders = round_orders(names, repeats + _SPLIT_ROUNDS)  # seeded alike: all ranks must run the same variant
    for order in islice(orders, repeats):
        for name in order:
            rounds[name].append(_seconds(variants[name], group, device))
    for order in orders:
        for name in order:
            with record_collectives() as log:
                seconds = _seconds(variants[name], group, device)
            shared = sum(one.seconds for one in log)
            splits[name].append((seconds - shared, shared))
            counts[name] = (len(log), sum(one.bytes for one in log))
    ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(ranks, (rounds, splits, counts), group=group)
    return {name: _summary(*([one[part][name] for one in ranks] for part in range(3))) for name in names}


def _seconds(run: Callable[[], object], group: dist.ProcessGroup, device: torch.device) -> float:
    dist.barrier(group)
    _synchronise(device)
    start = time.perf_counter()
    run()
    _synchronise(device)
    return time.perf_counter() - start


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _summary(
    rounds: list[list[float]], splits: list[list[tuple[float, float]]], counts: list[tuple[int, int]]
) -> RankTiming:
    """From each rank's samples, lists by rank."""
    by_round = [list(zip(*ranks, strict=True)) for ranks in zip(*splits, strict=True)]  # (computes, collectives)
    computes = [computes for computes, _ in by_round]
    return RankTiming(
        latency=Timing.of([1e3 * max(ranks) for ranks in zip(*rounds, strict=True)]),
        compute_ms=1e3 * median(max(one) for one in computes),
        skew_ms=1e3 * median(max(one) - min(one) for one in computes),
        collective_ms=1e3 * median(min(collectives) for _, collectives in by_round),
        collectives=max(count for count, _ in counts),
        bytes=max(size for _, size in counts),
    )
