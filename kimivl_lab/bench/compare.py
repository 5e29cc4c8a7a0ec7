"""The pattern of every operator benchmark: check all variants of a case, time them in turn, write a row each."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ..measure.accuracy import checked_errors
from ..measure.records import Recorder
from ..measure.roofline import floor_ms
from ..measure.timing import time_interleaved

COLUMNS = (
    "case",
    "variant",
    "patches",
    "latency_ms_p50",
    "latency_ms_p20",
    "latency_ms_p80",
    "repeats",
    "floor_ms",
    "speedup_ratio",
    "relative_error",
)


@dataclass
class Comparison:
    """Variants of one operator over many cases, against the variant called `baseline`.

    Attributes:
        gbps: this machine's copy bandwidth, for the floor column.
        tolerance: largest relative error that is timed.
    """

    record: Recorder
    baseline: str
    gbps: float
    tolerance: float
    device: str
    warmup: int
    repeats: int
    ratios: dict[str, list[float]] = field(default_factory=dict)

    def add(
        self,
        case: str,
        runs: Mapping[str, Callable[[], Tensor]],
        want: Tensor,
        *,
        patches: int,
        bytes_moved: int | Mapping[str, int],
        checks: Mapping[str, Callable[[], Tensor]] | None = None,
    ) -> None:
        """Checks `checks` (or `runs`) against `want`, times `runs`, writes a row a variant.

        Args:
            bytes_moved: the least that has to move, for the floor; one number, or one a variant.
        """
        errors = checked_errors(checks or runs, want, self.tolerance)
        timings = time_interleaved(runs, device=self.device, warmup=self.warmup, repeats=self.repeats)
        for name, timing in timings.items():
            least = bytes_moved if isinstance(bytes_moved, int) else bytes_moved[name]
            ratio = timings[self.baseline].p50_ms / timing.p50_ms
            self.ratios.setdefault(name, []).append(ratio)
            self.record.add(
                {
                    "case": case,
                    "variant": name,
                    "patches": patches,
                    "floor_ms": round(floor_ms(least, self.gbps), 4),
                    "speedup_ratio": round(ratio, 3),
                    "relative_error": f"{errors[name]:.3g}",
                    **timing.row(),
                }
            )

    def geometric_means(self) -> dict[str, float]:
        """Speed-up of each variant over the baseline, all cases together."""
        return {
            name: round(math.exp(sum(map(math.log, values)) / len(values)), 2) for name, values in self.ratios.items()
        }
