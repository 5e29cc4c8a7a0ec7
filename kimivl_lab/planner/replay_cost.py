"""The price of one replay beside its rows, in rows (merged tokens computed): what makes many small replays slow.

A forward of Kimi-VL's 27 blocks is K = 355 kernels: 13 a block and 4 more, counted in notebook 70. In a graph each
kernel takes some time whatever its size, because it starts, ends, and leaves the device idle in between. With f seconds
for that and p FLOP/s the device could have computed K f p FLOPs, and a row is 3.35 GFLOP (attention not counted), so

    price = K f p / 3.35e9 rows

The numbers are predicted, not measured: f = 3 us, the middle of the 2 to 4 us that small kernels take in a graph, and
p = 0.6 of the data sheet's peak, a share that large products reach. An H100 gives 355 * 3e-6 * 593e12 / 3.35e9 = 188
rows, an RTX 4090 31. Eight images of 64 rows on an H100 cost 8 * (64 + 188) = 2,016 rows in eight replays, and
512 + 188 = 700 in one.

An eager call has no graph, so the host starts each kernel. That takes 6 us (predicted) in place of f: an eager call
costs `eager_cost(price)`, twice the price. Where the host runs ahead of a busy device part of this is hidden, so for
large images it is an upper bound.

A record of `kimivl_lab.bench.graphs` replaces all of this by a measurement (`measured_replay_cost`).

Test: tests/test_replay_cost.py. Record: graphs__*.csv.
"""

import math
from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import Any

import numpy as np

KERNELS_OF_A_BLOCK, OTHER_KERNELS = 13, 4
KERNEL_FLOOR_S = 3e-6  # of the shortest kernel in a graph, on the device
LAUNCH_S = 6e-6  # of the host, to start one kernel without a graph
PUBLISHED_LAUNCH_S = 21e-6  # an engine's: 5.919 ms over 281 launches for a 64-token image (vLLM 52229, RTX PRO 6000)
SUSTAINED = 0.6  # of the data sheet's FLOP/s
ROW_FLOPS = 2 * (4 * (27 * (4 * 1152**2 + 2 * 1152 * 4304) + 588 * 1152) + 4608**2 + 4608 * 2048)  # with the projector
REPLAY_COST = 188  # rows: the price on an H100, the default of the planner, and of the runner on a GPU


def kernels(layers: int = 27) -> int:
    """Kernels of one forward: 355 for 27 layers."""
    return KERNELS_OF_A_BLOCK * layers + OTHER_KERNELS


def predicted_replay_cost(flops_per_s: float) -> int:
    """Rows that a GPU could compute in the fixed time of one replay, by the module's formula.

    Args:
        flops_per_s: p, that large products reach: measured, or `SUSTAINED` of the data sheet's peak.
    """
    return round(kernels() * KERNEL_FLOOR_S * flops_per_s / ROW_FLOPS)


def predicted_rows(rows: int, pairs: int, pair_rows: float, fixed: int) -> float:
    """The predicted time of a call in rows: its rows, its attention pairs at `pair_rows` rows each, its fixed time.

    Example: a replay of 1,024 rows with 16.8 million pairs at 1/26,600 and the price 188 takes as long as 1,843 rows.
    """
    return rows + pairs * pair_rows + fixed


def eager_cost(replay_cost: int) -> int:
    """Rows that an eager call costs beside its own, where a replay costs `replay_cost`."""
    return round(replay_cost * LAUNCH_S / KERNEL_FLOOR_S)


def measured_replay_cost(rows: Iterable[Mapping[str, Any]]) -> int:
    """The price from a record of `kimivl_lab.bench.graphs`, in rows of the tower that was measured.

    The medians of full budgets B are fitted by t = a + b B + c B^2 with a, c >= 0 and b > 0, by least relative squares;
    c is attention, and the price is a / b. Replays of 2.0, 3.0 and 5.0 ms for 10, 20 and 40 rows have a = 1 ms and
    b = 0.1 ms: 10 rows.

    Raises:
        ValueError: fewer than two full budgets, a time that is not positive, or times that do not grow with the budget.
    """
    times: dict[Any, Any] = {}
    for row in rows:
        if (row.get("phase"), row.get("variant")) == ("budget", "replay") and row.get("tokens") == row.get(
            "budget_tokens"
        ):
            times[row.get("budget_tokens")] = row.get("latency_ms_p50")
    if len(times) < 2:
        raise ValueError(
            f"the record holds {len(times)} replays of full budgets, at least 2 are needed: run bench.graphs"
        )
    if not all(isinstance(time, float | int) and 0 < time < math.inf for time in times.values()):
        raise ValueError(f"the record holds a time that is not positive: {list(times.values())} ms")
    budgets, measured = np.array(list(times), dtype=float), np.array(list(times.values()))
    terms = np.stack([np.ones_like(budgets), budgets, budgets**2], axis=1) / measured[:, None]
    best, least = None, math.inf
    for count in range(1, min(3, len(times)) + 1):  # every choice of terms; the best one without a negative coefficient
        for used in combinations(range(3), count):
            fit = np.linalg.lstsq(terms[:, used], np.ones_like(measured), rcond=None)[0]
            error = float(((terms[:, used] @ fit - 1) ** 2).sum())
            if 1 in used and (fit > 0).all() and error < least - 1e-12:
                best, least = dict(zip(used, fit.tolist(), strict=True)), error
    if best is None or measured[budgets.argmax()] <= measured[budgets.argmin()]:
        raise ValueError(f"the record's times do not grow with the budget: {times}")
    return round(best.get(0, 0.0) / best[1])
