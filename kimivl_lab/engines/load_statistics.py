"""Times to first token of a load test: percentiles with their uncertainty, and whether two runs differ.

Neighbouring requests share a queue, so their times are not independent. Both intervals therefore come from a bootstrap
of blocks: whole stretches of the run are drawn, not single requests. A run says nothing of how its machine changes
from run to run: several pairs of runs, A and B in turn, do.

Test: tests/test_ttft.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
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
    return compare_pairs([(first, second)], margin, confidence, seed)


def compare_pairs(
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]],
    margin: float = 0.03,
    confidence: float = 0.99,
    seed: int = 0,
) -> dict[str, Comparison]:
    """Compares several pairs of runs, each pair as in `compare`; use it where runs of one server differ among them.

    The ratio is the geometric mean of the pairs' ratios. Its interval is the wider one of two: that of the blocks
    within the runs, and that of Student's t for the pairs. Two pairs say little, five say much: at 99 % the second
    interval reaches 45 standard deviations of a pair to each side for two pairs, 2.9 for four, 2.1 for five.

    Raises:
        ValueError: no pairs, a pair without requests or with other numbers of them, or fewer than 20 in all pairs.
    """
    logs: dict[str, list[float]] = {name: [] for name in STATISTICS}
    drawn: dict[str, list[np.ndarray]] = {name: [] for name in STATISTICS}
    requests = sum(len(first) for first, _ in pairs)
    for number, (first, second) in enumerate(pairs):
        a, b = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
        if len(a) != len(b) or not len(a) or requests < _BLOCKS:
            raise ValueError(
                f"a comparison needs the same requests in both runs, {_BLOCKS} or more in all, "
                f"got {len(a)} and {len(b)} in pair {number + 1}, {requests} in all"
            )
        places = _blocks(len(a), seed + number)
        for name, of in STATISTICS.items():
            logs[name].append(float(np.log(of(b) / of(a))))
            drawn[name].append(np.log(of(b[places]) / of(a[places])))
    if not logs["mean"]:
        raise ValueError("no pairs of runs to compare")
    found = {}
    for name in STATISTICS:
        center = np.mean(logs[name])
        low, high = (
            center + _few_blocks(confidence) * (bound - center)
            for bound in _quantiles(np.mean(drawn[name], axis=0), confidence)
        )
        if len(logs[name]) > 1:
            reach = _t_quantile(confidence, len(logs[name]) - 1) * np.std(logs[name], ddof=1) / len(logs[name]) ** 0.5
            low, high = min(low, center - reach), max(high, center + reach)
        ratio = Estimate(*np.exp([center, low, high]).tolist())
        shown = abs(ratio.value - 1) >= margin and not ratio.low <= 1 <= ratio.high
        verdict = ("B is faster" if ratio.value < 1 else "B is slower") if shown else "no difference shown"
        found[name] = Comparison(ratio, verdict)
    return found


@cache
def _few_blocks(confidence: float) -> float:
    """By what quantiles of so few blocks are too narrow: Student's t over the normal one, and a degree of freedom."""
    normal = NormalDist().inv_cdf((1 + confidence) / 2)
    return _t_quantile(confidence, _BLOCKS - 1) / normal * (_BLOCKS / (_BLOCKS - 1)) ** 0.5


@cache
def _t_quantile(confidence: float, freedom: int) -> float:
    """Student's t that is exceeded to one side with a chance of (1 - confidence) / 2, to a hundredth of it."""
    drawn = np.random.default_rng(0).standard_t(freedom, 10**6)
    return float(np.quantile(np.abs(drawn), confidence))


def _blocks(count: int, seed: int) -> np.ndarray:
    """(_DRAWS, about count) places: each line consists of blocks that start anywhere and wrap around the end."""
    length = max(1, count // _BLOCKS)
    starts = np.random.default_rng(seed).integers(0, count, (_DRAWS, -(-count // length)))
    places = (starts[..., None] + np.arange(length)) % count
    return places.reshape(_DRAWS, -1)[:, :count]


def _estimate(value: Any, drawn: np.ndarray, confidence: float) -> Estimate:
    return Estimate(float(value), *_quantiles(drawn, confidence))


def _quantiles(drawn: np.ndarray, confidence: float) -> list[float]:
    return np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2]).tolist()
