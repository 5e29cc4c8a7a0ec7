"""Packed attention: every backend that runs here, on single pictures and on batches of many.

    python -m kimivl_lab.bench.attention [--quick] [--dtype bfloat16] [--out DIR] [--device cpu]

Full-size heads, random q, k and v. Every backend is compared with the float32 oracle before it is timed; all run in
turn. The floor is the time to read q, k and v and write the result once at this machine's measured copy bandwidth.
"""

import argparse
from functools import partial

import torch

from ..config import MoonViTConfig
from ..datasets import draw_sizes
from ..geometry import Grid, image_geometry, patch_counts
from ..measure.records import Recorder
from ..measure.roofline import copy_gbps
from ..moonvit.attention import ATTENTION_BACKENDS, attention_unavailable, eager_attention
from ..moonvit.metadata import prepare_encoder_metadata
from ..moonvit.position import Learnable2DInterpPosEmb
from ..moonvit.rope import Rope2DPosEmb
from . import command
from .compare import COLUMNS, Comparison

TOLERANCE = {"float32": 1e-5, "bfloat16": 8e-3}


def cases(quick: bool, seed: int) -> dict[str, list[Grid]]:
    """Batches by name."""
    found: dict[str, list[Grid]] = {"32x32": [(32, 32)], "16 of 16x16": [(16, 16)] * 16}
    if not quick:
        drawn = [image_geometry(*size).grid_hw for size in draw_sizes("coco_val2017", 8, seed)]
        found |= {"64x64": [(64, 64)], "8 of coco_val2017": drawn}
    return found


@torch.inference_mode()
def run(options: argparse.Namespace, gbps: float) -> dict[str, float]:
    """One record; returns the geometric-mean speed-ups over "sdpa"."""
    config, device = MoonViTConfig.preset("kimi-vl-a3b"), torch.device(options.device)
    dtype = getattr(torch, options.dtype)
    names = [name for name in ATTENTION_BACKENDS if name != "eager"]
    for name in names:
        if reason := attention_unavailable(name, device, dtype):
            command.progress(f"attention: {reason}")
    names = [name for name in names if attention_unavailable(name, device, dtype) is None]
    settings = command.settings(options, warmup=2, repeats=5 if options.quick else 15, copy_gbps=round(gbps, 1))
    with Recorder(
        "attention", options.dtype, COLUMNS, directory=options.out, device=device, settings=settings
    ) as record:
        comparison = Comparison(
            record, "sdpa", gbps, TOLERANCE[options.dtype], options.device, settings["warmup"], settings["repeats"]
        )
        table = Learnable2DInterpPosEmb(2, 2, 4).requires_grad_(False)  # attention reads offsets and lengths alone
        for case, grids in cases(options.quick, options.seed).items():
            command.progress(f"attention {options.dtype} {case}")
            metadata = prepare_encoder_metadata(
                grids, pos_emb=table, rope=Rope2DPosEmb(4), merge_kernel_size=config.merge_kernel_size, device=device
            )
            patches = sum(patch_counts(grids))
            generator = torch.Generator().manual_seed(options.seed)
            qkv = torch.randn(patches, 3, config.num_attention_heads, config.head_dim, generator=generator)
            qkv = qkv.to(dtype).to(device)
            q, k, v = qkv.unbind(1)
            comparison.add(
                case,
                {name: partial(ATTENTION_BACKENDS[name], q, k, v, metadata) for name in names},
                eager_attention(q.float(), k.float(), v.float(), metadata),
                patches=patches,
                bytes_moved=4 * q.numel() * q.element_size(),
            )
    command.progress(f"wrote {record.path}")
    return comparison.geometric_means()


def main() -> None:
    parser = command.parser("attention", __doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=tuple(TOLERANCE), help="%(default)s")
    options = parser.parse_args()
    gbps = copy_gbps(options.device)
    command.finish(
        {"benchmark": "attention", "copy_gbps": round(gbps, 1), "geometric_mean_speedup": run(options, gbps)}
    )


if __name__ == "__main__":
    main()
