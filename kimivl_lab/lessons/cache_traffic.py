"""Traffic for a cache of position embeddings, and what a policy makes of it, for notebook 25.

    grids = draw_grids("receipts", 2000, in_token_limit=16384)
    replayed = replay(PositionCache(max_bytes=2**28), grids)    # .hit_rate, .most_mib, .evictions

Use it to try a bound on the sizes of a workload before a server gets it. The entries are tensors without memory, so
that a bound of many GiB needs none.
Example: the keys A B A C A with room for two entries give 1 hit first in first out, and 2 hits least recently used.
Test: tests/test_cache_traffic.py. Data: data/workloads.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ..datasets import draw_sizes
from ..geometry import IN_TOKEN_LIMIT, GridLike, image_geometry
from ..moonvit.position_cache import PositionCache

BYTES_A_PATCH = 2 * 1152  # bfloat16
_ENTRY: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta"}


class Replay(NamedTuple):
    """What a cache did with one sequence of grids."""

    hit_rate: float
    most_mib: float
    evictions: int


def draw_grids(workload: str, count: int, in_token_limit: int = IN_TOKEN_LIMIT, seed: int = 0) -> list[GridLike]:
    """The grids of `count` images drawn from a workload by frequency; sizes that the processor refuses are left out."""
    grids: list[GridLike] = []
    for width, height in draw_sizes(workload, count, seed):
        try:
            grids.append(image_geometry(width, height, in_token_limit=in_token_limit).grid_hw)
        except ValueError:  # a side of 512 patches or more
            continue
    return grids


def mib(grids: Iterable[GridLike]) -> float:
    """MiB of one entry for each grid given, in bfloat16."""
    return sum(h * w for h, w in grids) * BYTES_A_PATCH / 2**20


def replay(cache: PositionCache, grids: Iterable[GridLike]) -> Replay:
    """Looks up every grid in turn in a new `cache`."""
    most = 0
    for grid in grids:
        cache.get(tuple(grid), lambda grid=grid: torch.empty(grid[0] * grid[1], 1152, **_ENTRY))
        most = max(most, cache.stats.bytes)
    return Replay(cache.stats.hit_rate, most / 2**20, cache.stats.evictions)


def hits(keys: Sequence[object], entries: int, policy: str = "lru") -> int:
    """Lookups of `keys` that find their entry, with room for so many `entries`."""
    cache = PositionCache(max_bytes=None, max_entries=entries, policy=policy)
    for key in keys:
        cache.get(key, lambda: torch.empty(1, **_ENTRY))
    return cache.stats.hits


def most_hits(keys: Sequence[object], entries: int) -> int:
    """The most hits that any policy can have: it evicts the key whose next use is farthest away (Belady 1966).

    No server can run it, because it knows the future; it says how much a better policy could win.
    """
    held: set[object] = set()
    found = 0
    for now, key in enumerate(keys):
        found += key in held
        held.add(key)
        if len(held) > entries:
            later = list(keys[now + 1 :])
            held.remove(max(held, key=lambda one: later.index(one) if one in later else len(later)))
    return found


def break_even(compute: float, hit: float, miss: float) -> float:
    """The hit rate at which a cache takes as long as no cache; infinite where a hit takes longer than computing.

    Example: computing 10 ms, a hit 2 ms and a miss 18 ms give 0.5.
    """
    return math.inf if hit > compute else (miss - compute) / (miss - hit)


def rate_words(rate: float) -> str:
    """A break-even rate for people: "72%", "0%" where the cache always pays, "never" where it never does."""
    return "never" if rate > 1 else f"{max(rate, 0):.0%}"
