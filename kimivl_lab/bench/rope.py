"""RoPE-2D: every rotation of q and k, on single grids and on a batch drawn from real sizes.

    python -m kimivl_lab.bench.rope [--quick] [--compiled] [--dtype float32] [--out DIR] [--device cpu]

Every variant is compared with the float64 rotation before it is timed. The floor is the time to read and write q and k
once and to read the factors, at this machine's copy bandwidth.

Test: tests/test_benchmarks.py. Record: rope__*.csv.
"""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from ..geometry import GridLike
from ..kernels.rotation import ROPE_IMPLEMENTATIONS, rotate_complex, rotation_unavailable
from ..moonvit.rope import Rope2DPosEmb
from . import harness
from .compare import COLUMNS, compare, mean_speedups
from .towers import drawn_grids, random_qkv

SINGLE_GRIDS: Sequence[GridLike] = [(32, 32), (36, 46), (64, 64)]
TOLERANCE = {"float32": 1e-6, "bfloat16": 4e-3}


def cases(quick: bool, seed: int) -> dict[str, Sequence[GridLike]]:
    """Batches by name."""
    singles: dict[str, Sequence[GridLike]] = {f"{h}x{w}": [(h, w)] for h, w in SINGLE_GRIDS}
    return singles if quick else singles | {"8 of coco_val2017": drawn_grids("coco_val2017", 8, seed)}


def implementations(options: argparse.Namespace) -> list[str]:
    """Those that run here."""
    device = torch.device(options.device)
    names = []
    for name in ROPE_IMPLEMENTATIONS:
        if reason := rotation_unavailable(name, device, getattr(torch, options.dtype)):
            harness.progress(f"rope: {reason}")
        elif name != "compiled" or options.compiled or device.type == "cuda":
            names.append(name)
    return names


def turned(name: str, qkv: Tensor, cos_sin: Tensor) -> Tensor:
    """q and k after one rotation, which "in_place" makes in a copy."""
    return ROPE_IMPLEMENTATIONS[name](qkv.clone()[:, :2], cos_sin)


@torch.inference_mode()
def rows(options: argparse.Namespace) -> Iterator[harness.Row]:
    """The rows of one record: full-size heads, random q and k."""
    names = implementations(options)
    for case, grids in cases(options.quick, options.seed).items():
        qkv = random_qkv(options, grids)
        work = qkv.clone()[:, :2]  # "in_place" turns it on and on: the same work, and a rotation keeps the size
        cos_sin = Rope2DPosEmb(qkv.shape[-1]).get_cos_sin(grids, options.device)
        yield from compare(
            options,
            case,
            {name: partial(ROPE_IMPLEMENTATIONS[name], work, cos_sin) for name in names},
            rotate_complex(qkv[:, :2].double(), cos_sin.double()),
            baseline="complex",
            tolerance=TOLERANCE[options.dtype],
            patches=len(qkv),
            bytes_moved=2 * work.numel() * work.element_size() + cos_sin.nbytes,
            checks={name: partial(turned, name, qkv, cos_sin) for name in names},
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser("rope", __doc__, dtypes=TOLERANCE, rounds=(3, 31, 7))
    parser.add_argument("--compiled", action="store_true", help="also torch.compile's kernel (needs a compiler)")
    harness.run_benchmark(parser, COLUMNS, rows, mean_speedups, arguments, yardsticks=harness.copy_rate)


if __name__ == "__main__":
    main()
