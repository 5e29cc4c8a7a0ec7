"""Position embedding: four implementations and a cache hit, on single grids and on batches drawn from real sizes.

    python -m kimivl_lab.bench.position [--quick] [--out DIR] [--device cpu]

Every variant is compared with torch's float64 bicubic before it is timed, and all variants of a case run in turn. The
floor is the time to read the table and write the result once at this machine's measured copy bandwidth.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..config import MoonViTConfig
from ..datasets import draw_sizes
from ..geometry import Grid, image_geometry, patch_counts
from ..measure.accuracy import checked_errors
from ..measure.records import Recorder
from ..measure.roofline import copy_gbps, floor_ms
from ..measure.timing import TIMERS, time_interleaved
from ..moonvit.position import POSITION_OPERATORS, Learnable2DInterpPosEmb
from . import command

SINGLE_GRIDS: list[Grid] = [(36, 46), (48, 86), (446, 12), (128, 128), (2, 510), (66, 66), (4, 40)]
MIXED = ("coco_val2017", "pew_charts", "receipts")
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 4e-3}
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


def variants(module: Learnable2DInterpPosEmb, grids: list[Grid]) -> dict[str, Callable[[], Tensor]]:
    """By name: the four operators without a cache's help, a cache that has to make every entry, and a hit."""

    def cached(*, cold: bool) -> Tensor:
        if cold:
            module.cache.clear()
        return module.get_pos_embeds(grids, implementation="cached")

    return {
        **{name: lambda name=name: module.get_pos_embeds(grids, implementation=name) for name in POSITION_OPERATORS},
        "cache_miss": lambda: cached(cold=True),
        "cache_hit": lambda: cached(cold=False),
    }


def cases(quick: bool, seed: int) -> dict[str, list[Grid]]:
    """Batches by name: one image of each grid, and 8 images of each workload."""
    singles = {f"{h}x{w}": [(h, w)] for h, w in (SINGLE_GRIDS[:4] if quick else SINGLE_GRIDS)}
    if quick:
        return singles
    mixed = {name: [image_geometry(*size).grid_hw for size in draw_sizes(name, 8, seed)] for name in MIXED}
    return singles | {f"8 of {name}": grids for name, grids in mixed.items()}


@torch.no_grad()
def run(dtype: torch.dtype, gbps: float, options) -> dict[str, float]:
    """One record; returns the geometric-mean speed-ups over "interpolate" on single grids that are not the table's."""
    config = MoonViTConfig.preset("kimi-vl-a3b")
    torch.manual_seed(options.seed)
    module = Learnable2DInterpPosEmb(config.init_pos_emb_height, config.init_pos_emb_width, config.hidden_size)
    torch.nn.init.normal_(module.weight)
    module = module.to(device=options.device, dtype=dtype).eval()
    exact = Learnable2DInterpPosEmb(*module.weight.shape).double()
    exact.weight.copy_(module.weight.cpu())
    repeats = 7 if options.quick else 21
    ratios: dict[str, list[float]] = {}
    name = str(dtype).removeprefix("torch.")
    settings = {"warmup": 2, "repeats": repeats, "seed": options.seed, "timer": TIMERS[options.device.split(":")[0]]}
    with Recorder(
        "position", name, COLUMNS, directory=options.out, device=options.device, copy_gbps=round(gbps, 1), **settings
    ) as record:
        for case, grids in cases(options.quick, options.seed).items():
            command.progress(f"position {name} {case}")
            runs = variants(module, grids)
            want = exact.get_pos_embeds(grids).to(options.device)
            errors = checked_errors(runs, want, TOLERANCE[dtype])
            timings = time_interleaved(runs, device=options.device, warmup=2, repeats=repeats)
            patches = sum(patch_counts(grids))
            moved = module.weight.nbytes + patches * config.hidden_size * module.weight.element_size()
            for variant, timing in timings.items():
                ratio = timings["interpolate"].p50_ms / timing.p50_ms
                if len(grids) == 1:
                    ratios.setdefault(variant, []).append(ratio)
                record.add(
                    {
                        "case": case,
                        "variant": variant,
                        "patches": patches,
                        "floor_ms": round(floor_ms(moved, gbps), 4),
                        "speedup_ratio": round(ratio, 3),
                        "relative_error": f"{errors[variant]:.3g}",
                        **timing.row(),
                    }
                )
        command.progress(f"wrote {record.path}")
    return {variant: round(math.exp(sum(map(math.log, r)) / len(r)), 2) for variant, r in ratios.items()}


def main() -> None:
    options = command.parser("position", __doc__.splitlines()[0]).parse_args()
    gbps = copy_gbps(options.device)
    speedups = {
        str(dtype).removeprefix("torch."): run(dtype, gbps, options) for dtype in (torch.float32, torch.bfloat16)
    }
    command.finish({"benchmark": "position", "copy_gbps": round(gbps, 1), "geometric_mean_speedup": speedups})


if __name__ == "__main__":
    main()
