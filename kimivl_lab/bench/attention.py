"""Packed attention: every backend that runs here, on single images and on batches of many.

    python -m kimivl_lab.bench.attention [--quick] [--dtype bfloat16] [--out DIR] [--device cpu]

The heads have the published size; q, k and v are random. Every backend is compared with the float32 reference before it
is timed. The floor is the time to read q, k and v and to write the result once, at this machine's copy bandwidth.

Test: tests/test_benchmarks.py. Record: attention__*.csv.
"""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from ..geometry import MERGE_KERNEL_SIZE, GridLike
from ..moonvit.attention import ATTENTION_BACKENDS, attention_unavailable, eager_attention
from ..moonvit.metadata import prepare_encoder_metadata
from ..moonvit.position import Learnable2DInterpPosEmb
from ..moonvit.rope import Rope2DPosEmb
from . import harness
from .compare import COLUMNS, compare, mean_speedups
from .towers import drawn_grids, random_qkv

TOLERANCE = {"float32": 1e-5, "bfloat16": 8e-3}


def cases(quick: bool, seed: int) -> dict[str, Sequence[GridLike]]:
    """Batches by name."""
    found: dict[str, Sequence[GridLike]] = {"32x32": [(32, 32)], "16 of 16x16": [(16, 16)] * 16}
    if not quick:
        found |= {"64x64": [(64, 64)], "8 of coco_val2017": drawn_grids("coco_val2017", 8, seed)}
    return found


@torch.inference_mode()
def rows(options: argparse.Namespace) -> Iterator[harness.Row]:
    """The rows of one record."""
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    unavailable = {name: attention_unavailable(name, device, dtype) for name in ATTENTION_BACKENDS if name != "eager"}
    for reason in filter(None, unavailable.values()):
        harness.progress(f"attention: {reason}")
    names = [name for name, reason in unavailable.items() if reason is None]
    table = Learnable2DInterpPosEmb(2, 2, 4).requires_grad_(False)  # attention reads offsets and lengths alone
    for case, grids in cases(options.quick, options.seed).items():
        metadata = prepare_encoder_metadata(
            grids, pos_emb=table, rope=Rope2DPosEmb(4), merge_kernel_size=MERGE_KERNEL_SIZE, device=device
        )
        q, k, v = random_qkv(options, grids).unbind(1)
        yield from compare(
            options,
            case,
            {name: partial(ATTENTION_BACKENDS[name], q, k, v, metadata) for name in names},
            eager_attention(q.float(), k.float(), v.float(), metadata),
            baseline="sdpa",
            tolerance=TOLERANCE[options.dtype],
            patches=len(q),
            bytes_moved=4 * q.numel() * q.element_size(),
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser("attention", __doc__, dtypes=TOLERANCE, default=("bfloat16",), rounds=(2, 15, 5))
    harness.run_benchmark(parser, COLUMNS, rows, mean_speedups, arguments, yardsticks=harness.copy_rate)


if __name__ == "__main__":
    main()
