"""RoPE-2D: q and k turned by each implementation, on single grids and on batches drawn from real sizes.

    python -m kimivl_lab.bench.rope [--quick] [--compiled] [--out DIR] [--device cpu]

Every variant is compared with the float64 rotation before it is timed, and all variants of a case run in turn. The
floor is the time to read and write q and k once, and to read the factors, at this machine's measured copy bandwidth.
"""

import argparse

import torch

from ..config import MoonViTConfig
from ..datasets import draw_sizes
from ..geometry import Grid, image_geometry, patch_counts
from ..kernels.amx.library import amx_unavailable
from ..kernels.rotation import ROPE_IMPLEMENTATIONS, rotate_complex
from ..measure.records import Recorder
from ..measure.roofline import copy_gbps
from ..moonvit.rope import Rope2DPosEmb
from . import command
from .compare import COLUMNS, Comparison

SINGLE_GRIDS: list[Grid] = [(32, 32), (36, 46), (64, 64)]
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3}


def cases(quick: bool, seed: int) -> dict[str, list[Grid]]:
    """Batches by name."""
    singles = {f"{h}x{w}": [(h, w)] for h, w in SINGLE_GRIDS}
    drawn = [image_geometry(*size).grid_hw for size in draw_sizes("coco_val2017", 8, seed)]
    return singles if quick else singles | {"8 of coco_val2017": drawn}


def implementations(dtype: torch.dtype, options: argparse.Namespace) -> list[str]:
    """Those that run here."""
    names = [name for name in ROPE_IMPLEMENTATIONS if name != "compiled" or options.compiled]
    if reason := amx_unavailable(torch.device(options.device), dtype):
        command.progress(f"rope: {reason}")
        names.remove("amx")
    return names


def add_case(
    comparison: Comparison,
    case: str,
    grids: list[Grid],
    names: list[str],
    dtype: torch.dtype,
    options: argparse.Namespace,
) -> None:
    """Full-size heads, random q and k."""
    config = MoonViTConfig.preset("kimi-vl-a3b")
    patches = sum(patch_counts(grids))
    generator = torch.Generator().manual_seed(options.seed)
    qkv = torch.randn(patches, 3, config.num_attention_heads, config.head_dim, generator=generator)
    qkv = qkv.to(dtype).to(options.device)
    work = qkv.clone()  # "in_place" turns it on and on: the same work, and a rotation keeps the size
    cos_sin = Rope2DPosEmb(config.head_dim).get_cos_sin(grids, options.device)
    comparison.add(
        case,
        {name: lambda name=name: ROPE_IMPLEMENTATIONS[name](work[:, :2], cos_sin) for name in names},
        rotate_complex(qkv[:, :2].double(), cos_sin.double()),
        patches=patches,
        bytes_moved=2 * qkv[:, :2].numel() * qkv.element_size() + cos_sin.nbytes,
        checks={name: lambda name=name: ROPE_IMPLEMENTATIONS[name](qkv.clone()[:, :2], cos_sin) for name in names},
    )


@torch.inference_mode()
def run(dtype: torch.dtype, gbps: float, options: argparse.Namespace) -> dict[str, float]:
    """One record; returns the geometric-mean speed-ups over "complex"."""
    settings = command.settings(options, warmup=3, repeats=7 if options.quick else 31, copy_gbps=round(gbps, 1))
    with Recorder(
        "rope", command.name(dtype), COLUMNS, directory=options.out, device=options.device, settings=settings
    ) as record:
        comparison = Comparison(
            record, "complex", gbps, TOLERANCE[dtype], options.device, settings["warmup"], settings["repeats"]
        )
        names = implementations(dtype, options)
        for case, grids in cases(options.quick, options.seed).items():
            command.progress(f"rope {command.name(dtype)} {case}")
            add_case(comparison, case, grids, names, dtype, options)
    command.progress(f"wrote {record.path}")
    return comparison.geometric_means()


def main() -> None:
    parser = command.parser("rope", __doc__)
    parser.add_argument("--compiled", action="store_true", help="also torch.compile's kernel (needs a compiler)")
    options = parser.parse_args()
    options.compiled |= options.device.startswith("cuda")
    gbps = copy_gbps(options.device)
    speedups = {command.name(dtype): run(dtype, gbps, options) for dtype in TOLERANCE}
    command.finish({"benchmark": "rope", "copy_gbps": round(gbps, 1), "geometric_mean_speedup": speedups})


if __name__ == "__main__":
    main()
