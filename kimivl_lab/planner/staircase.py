"""The best staircase over a distribution: the steps for which rounding every total up to a step costs least.

Test: tests/test_budgets.py.
"""

from collections.abc import Sequence

import numpy as np


def best_steps(weights: Sequence[float] | np.ndarray, prices: Sequence[float] | np.ndarray, steps: int) -> list[int]:
    """Positions of at most `steps` steps, exact, by dynamic programming.

    With totals in ascending order, each is served by the first step at or above it and pays that step's price:

        cost[s][j] = min over i <= j of cost[s - 1][i - 1] + prices[j] * weights[i..j].sum()

    O(n^2 * steps). The last position is always a step, because every total must be served.

    Args:
        weights: (n,) how often each total occurs, 0 or more.
        prices: (n,) of serving one total by a step at this position.
        steps: 1 or more.

    Returns:
        Positions into the n totals, ascending. Weights 5, 1, 1 and prices 3, 7, 8 with 2 steps give [0, 2].
    """
    weights, prices = np.asarray(weights, dtype=float), np.asarray(prices, dtype=float)
    n = len(weights)
    if n == 0 or len(prices) != n or steps < 1:
        raise ValueError(f"{n} weights, {len(prices)} prices, {steps} steps: give as many of each, and at least one")
    below = np.concatenate(([0.0], np.cumsum(weights)))  # below[i]: weight of the totals before i
    cost = prices * below[1:]
    starts = [np.zeros(n, dtype=int)]  # by layer: the first total that the step at j serves
    for _ in range(min(steps, n) - 1):
        before = np.concatenate(([0.0], cost[:-1]))
        layer, start = np.empty(n), np.empty(n, dtype=int)
        for j in range(n):
            options = before[: j + 1] + prices[j] * (below[j + 1] - below[: j + 1])
            start[j] = options.argmin()
            layer[j] = options[start[j]]
        cost = layer
        starts.append(start)
    positions, j = [], n - 1
    for start in reversed(starts):
        positions.append(j)
        j = int(start[j]) - 1
        if j < 0:
            break
    return positions[::-1]
