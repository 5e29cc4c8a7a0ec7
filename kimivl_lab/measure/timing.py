"""The one timing function: warm-up, interleaved variants, median and p20-p80.

All variants run once in every round, in a new random order each round. Rounds spread a drift of the machine's speed
over all variants. The random order changes which variant ran before, because a variant finds the caches that its
predecessor left: in a fixed cycle (A B C, B C A, ...) B always follows A, and of two equal functions the second
measures faster.
On a GPU the clock is a pair of device events; on a CPU it is `time.perf_counter_ns`.

Test: tests/test_timing.py.
"""

import gc
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

TIMERS = {"cpu": "time.perf_counter_ns", "cuda": "torch.cuda.Event"}


@dataclass(frozen=True)
class Timing:
    """Percentiles of one variant's latency in milliseconds over `repeats` counted runs."""

    p20_ms: float
    p50_ms: float
    p80_ms: float
    repeats: int

    @classmethod
    def of(cls, samples_ms: list[float]) -> "Timing":
        p20, p50, p80 = torch.tensor(samples_ms, dtype=torch.float64, device="cpu").quantile(_PERCENTILES).tolist()
        return cls(p20, p50, p80, len(samples_ms))

    def row(self) -> dict[str, float | int]:
        """The columns of a record."""
        return {
            "latency_ms_p50": round(self.p50_ms, 5),
            "latency_ms_p20": round(self.p20_ms, 5),
            "latency_ms_p80": round(self.p80_ms, 5),
            "repeats": self.repeats,
        }


_PERCENTILES = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64, device="cpu")


def round_orders(names: Sequence[str], rounds: int, seed: int | str = 0) -> Iterator[list[str]]:
    """The order in which the variants run, for each round: every name once, drawn from `seed`."""
    generator = random.Random(seed)
    for _ in range(rounds):
        yield generator.sample(names, len(names))


def time_interleaved(
    variants: Mapping[str, Callable[[], object]],
    *,
    device: torch.device | str = "cpu",
    warmup: int = 2,
    repeats: int = 10,
    seed: int | str = 0,
    on_round: Callable[[int], object] | None = None,
) -> dict[str, Timing]:
    """Times each callable of `variants` in `repeats` rounds; every round runs all of them in a new random order.

    Args:
        device: where the work runs; "cuda" is timed with device events.
        warmup: uncounted runs of each variant first.
        seed: of the orders. Give each case another one, or all cases share the neighbours of a few rounds.
        on_round: called with the number of finished rounds (progress).
    """
    if warmup < 0 or repeats < 1:
        raise ValueError(f"warmup must be at least 0 and repeats at least 1, got {warmup} and {repeats}")
    clock = _time_cuda if torch.device(device).type == "cuda" else _time_cpu
    names = list(variants)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        for _ in range(warmup):
            clock(variants[name])
    collecting = gc.isenabled()
    gc.disable()
    try:
        for done, order in enumerate(round_orders(names, repeats, seed), start=1):
            for name in order:
                samples[name].append(clock(variants[name]))
            if on_round is not None:
                on_round(done)
    finally:
        if collecting:
            gc.enable()
    return {name: Timing.of(values) for name, values in samples.items()}


def _time_cpu(run: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - start) / 1e6


def _time_cuda(run: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
