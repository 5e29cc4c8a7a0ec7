"""Non-negative least squares for a handful of coefficients, by relative error."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np


def fit_nonnegative(
    features: Sequence[Sequence[float]], values: Sequence[float], known: Sequence[float] | float = 0.0
) -> list[float]:
    """Coefficients x >= 0 that minimise the sum of ((known + features x - values) / values)^2.

    A time of a millisecond counts as much as one of a second. Exact: the best of the least-squares solutions over every
    subset of the columns, so for few columns only.

    Args:
        features: one row a value, one column a coefficient.
        values: positive.
        known: the part of each value that is explained already.

    Raises:
        ValueError: no values, or one that is not positive.
    """
    wanted = np.asarray(values, dtype=np.float64)
    if not wanted.size or not (wanted > 0).all():
        raise ValueError(f"a fit needs measured values, all positive, got {list(values)!r:.100}")
    rows = np.asarray(features, dtype=np.float64) / wanted[:, None]
    target = 1 - np.asarray(known) / wanted
    scale = np.abs(rows).max(axis=0)  # columns differ by many powers of ten
    used = np.flatnonzero(scale)
    best, solution = float((target**2).sum()), np.zeros(len(scale))
    for count in range(1, len(used) + 1):
        for columns in map(list, combinations(used, count)):
            scaled = rows[:, columns] / scale[columns]
            found = np.linalg.lstsq(scaled, target, rcond=None)[0]
            squares = float(((scaled @ found - target) ** 2).sum())
            if (found >= 0).all() and squares < best:
                best, solution = squares, np.zeros(len(scale))
                solution[columns] = found / scale[columns]
    return solution.tolist()
