"""Position embedding: every implementation and a cache hit, on single grids and on batches drawn from real sizes.

    python -m kimivl_lab.bench.position [--quick] [--dtype float32] [--out DIR] [--device cpu]

Every variant is compared with torch's float64 bicubic before it is timed. The floor is the time to read the lines of
the table that matter and to write the result once, at this machine's copy bandwidth; for a hit, the time to read the
entry and to write the result.

Test: tests/test_benchmarks.py. Record: position__*.csv.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..config import MoonViTConfig
from ..geometry import GridLike, patch_counts
from ..moonvit.position import POSITION_OPERATORS, Learnable2DInterpPosEmb
from . import harness
from .compare import COLUMNS, compare, mean_speedups
from .towers import drawn_grids

SINGLE_GRIDS: Sequence[GridLike] = [(36, 46), (48, 86), (446, 12), (128, 128), (2, 510), (66, 66), (4, 40)]
MIXED = ("coco_val2017", "pew_charts", "receipts")
TOLERANCE = {"float32": 5e-6, "bfloat16": 4e-3}


def full_size_table(
    dtype: torch.dtype, device: str, seed: int
) -> tuple[Learnable2DInterpPosEmb, Learnable2DInterpPosEmb]:
    """A random table of the published size, and the same values in float64 on the host: the reference."""
    config = MoonViTConfig.preset("kimi-vl-a3b")
    torch.manual_seed(seed)
    module = Learnable2DInterpPosEmb(config.init_pos_emb_height, config.init_pos_emb_width, config.hidden_size)
    torch.nn.init.normal_(module.weight)
    module = module.to(device=device, dtype=dtype).eval()
    exact = Learnable2DInterpPosEmb(*module.weight.shape).double()
    with torch.no_grad():
        exact.weight.copy_(module.weight.cpu())
    return module, exact


def cached(module: Learnable2DInterpPosEmb, grids: Sequence[GridLike], *, cold: bool) -> Tensor:
    """Through the cache; `cold` drops its entries first."""
    if cold:
        module.cache.drop_entries()
    return module.get_pos_embeds(grids, implementation="cached")


def variants(module: Learnable2DInterpPosEmb, grids: Sequence[GridLike]) -> dict[str, Callable[[], Tensor]]:
    """By name: the operators without a cache's help, a cache that has to make every entry, and a hit."""
    runs: dict[str, Callable[[], Tensor]] = {
        name: lambda name=name: module.get_pos_embeds(grids, implementation=name) for name in POSITION_OPERATORS
    }
    return runs | {
        "cache_miss": lambda: cached(module, grids, cold=True),
        "cache_hit": lambda: cached(module, grids, cold=False),
    }


def least_bytes(table: Tensor, grids: Sequence[GridLike], *, hit: bool) -> int:
    """Bytes that any implementation reads and writes: 4 taps an axis touch at most 4h x 4w of the table's rows."""
    height, width, dim = table.shape
    rows = sum(patch_counts(grids))
    read = rows if hit else sum(min(4 * h, height) * min(4 * w, width) for h, w in grids)
    return (read + rows) * dim * table.element_size()


def cases(quick: bool, seed: int) -> dict[str, Sequence[GridLike]]:
    """Batches by name: one image of each grid, and 8 images of each workload."""
    grids = SINGLE_GRIDS[:4] if quick else SINGLE_GRIDS
    singles: dict[str, Sequence[GridLike]] = {f"{h}x{w}": [(h, w)] for h, w in grids}
    return singles if quick else singles | {f"8 of {name}": drawn_grids(name, 8, seed) for name in MIXED}


@torch.no_grad()
def rows(options: argparse.Namespace) -> Iterator[harness.Row]:
    """The rows of one record."""
    module, exact = full_size_table(getattr(torch, options.dtype), options.device, options.seed)
    for case, grids in cases(options.quick, options.seed).items():
        runs = variants(module, grids)
        yield from compare(
            options,
            case,
            runs,
            exact.get_pos_embeds(grids).to(options.device),
            baseline="interpolate",
            tolerance=TOLERANCE[options.dtype],
            patches=sum(patch_counts(grids)),
            bytes_moved={name: least_bytes(module.weight, grids, hit=name == "cache_hit") for name in runs},
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser("position", __doc__, dtypes=TOLERANCE, rounds=(2, 21, 7))
    harness.run_benchmark(parser, COLUMNS, rows, mean_speedups, arguments, yardsticks=harness.copy_rate)


if __name__ == "__main__":
    main()
