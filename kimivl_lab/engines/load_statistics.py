"""Times to first token of a load test: percentiles with their uncertainty, and whether two runs differ.

Neighbouring requests share a queue, so their times are not independent. Both intervals therefore come from a bootstrap
of blocks: whole stretches of the run are drawn, not single requests.

Test: tests/test_ttft.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

STATISTICS: dict[str, Callable[[np.ndarray], Any]] = {
    "mean": lambda times: times.mean(axis=-1),
    "median": lambda times: np.median(times, axis=-1),
    "P90": lambda times: np.percentile(times, 90, axis=-1),
    "P99": lambda times: np.percentile(times, 99, axis=-1),
}
_BLOCKS = 20
_DRAWS = 2000


@dataclass(frozen=True)
class Estimate:
    """A number, and the interval that contains the true one with the given confidence."""

    value: float
    low: float
    high: float


def summarise(times: Sequence[float], confidence: float = 0.95, seed: int = 0) -> dict[str, Estimate]:
    """Mean, median, P90 and P99 of times in the order of their requests. ValueError for no times."""
    values = np.asarray(times, dtype=float)
    if not len(values):
        raise ValueError("no times: no request was answered")
    drawn = values[_blocks(len(values), seed)]
    return {name: _estimate(of(values), of(drawn), confidence) for name, of in STATISTICS.items()}


@dataclass(frozen=True)
class Comparison:
    """B's time over A's, for one statistic. `verdict` is "no difference shown", "B is faster" or "B is slower"."""

    ratio: Estimate
    verdict: str


def compare(
    first: Sequence[float], second: Sequence[float], margin: float = 0.03, confidence: float = 0.99, seed: int = 0
) -> dict[str, Comparison]:
    """Compares two runs request by request: the same arrivals and images, so that most of their variation cancels.

    A difference is shown if the interval of the ratio lies on one side of 1 and the ratio is off by `margin` or more:
    a machine that is a little slower in the second run is no property of its server.

    Args:
        first, second: times of A and B; entry i of both belongs to one request.

    Raises:
        ValueError: other numbers of times, or fewer than 20 of them.
    """
    a, b = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    if len(a) != len(b) or len(a) < _BLOCKS:
        raise ValueError(
            f"a comparison needs the same {_BLOCKS} or more requests in both runs, got {len(a)} and {len(b)}"
        )
    places = _blocks(len(a), seed)
    found = {}
    for name, of in STATISTICS.items():
        ratio = _estimate(of(b) / of(a), of(b[places]) / of(a[places]), confidence)
        shown = abs(ratio.value - 1) >= margin and not ratio.low <= 1 <= ratio.high
        verdict = ("B is faster" if ratio.value < 1 else "B is slower") if shown else "no difference shown"
        found[name] = Comparison(ratio, verdict)
    return found


def _blocks(count: int, seed: int) -> np.ndarray:
    """(_DRAWS, about count) places: each line consists of blocks that start anywhere and wrap around the end."""
    length = max(1, count // _BLOCKS)
    starts = np.random.default_rng(seed).integers(0, count, (_DRAWS, -(-count // length)))
    places = (starts[..., None] + np.arange(length)) % count
    return places.reshape(_DRAWS, -1)[:, :count]


def _estimate(value: Any, drawn: np.ndarray, confidence: float) -> Estimate:
    low, high = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Estimate(float(value), float(low), float(high))
