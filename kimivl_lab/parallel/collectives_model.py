"""What collectives cost: bytes by formula, seconds by latency and bandwidth.

A ring of R ranks passes a tensor on in R - 1 steps; an all-reduce does so twice, to reduce and then to gather, in
pieces of 1/R. A broadcast goes down a binary tree. A step costs alpha seconds and beta more for each byte; both are
fitted on measured collectives, one pair for each kind.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from .least_squares import fit_nonnegative

KINDS = ("all_reduce", "all_gather", "broadcast")


@dataclass(frozen=True)
class CollectivePoint:
    """One measured collective.

    Attributes:
        kind: "all_reduce", "all_gather" or "broadcast".
        ranks: world size.
        bytes: of the tensor that it leaves on every rank, as `collectives.Collective` counts them.
        seconds: until the last rank has the result (median of repeats).
    """

    kind: str
    ranks: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class LinkCost:
    """Latency and transfer time of one step of a collective: `alpha` in seconds, `beta` in seconds a byte."""

    alpha: float
    beta: float

    def seconds(self, kind: str, ranks: int, size: int) -> float:
        """Of one collective that leaves `size` bytes on every rank; 0 on one rank. `kind`: see `steps_and_bytes`."""
        steps, sent = steps_and_bytes(kind, ranks, size)
        return self.alpha * steps + self.beta * sent


def steps_and_bytes(kind: str, ranks: int, size: int) -> tuple[int, float]:
    """(steps one after another, bytes that the busiest rank sends) of a collective; (0, 0) on one rank.

    Args:
        kind: "all_reduce", "all_gather" or "broadcast".
        size: bytes of the tensor that it leaves on every rank.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown collective {kind!r}: one of {', '.join(KINDS)}")
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    if kind == "all_reduce":
        return 2 * (ranks - 1), 2 * (ranks - 1) / ranks * size
    if kind == "all_gather":
        return ranks - 1, (ranks - 1) / ranks * size
    levels = (ranks - 1).bit_length()
    return levels, levels * size


def fit_links(points: Iterable[CollectivePoint]) -> dict[str, LinkCost]:
    """alpha and beta of every kind among the points, by relative least squares."""
    by_kind: dict[str, list[CollectivePoint]] = {}
    for point in points:
        by_kind.setdefault(point.kind, []).append(point)
    return {
        kind: LinkCost(
            *fit_nonnegative(
                [steps_and_bytes(kind, point.ranks, point.bytes) for point in group],
                [point.seconds for point in group],
            )
        )
        for kind, group in by_kind.items()
    }
