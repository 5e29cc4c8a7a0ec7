"""Encoder metadata: what the grids give, built plainly and into one buffer, on batches of real sizes.

    python -m kimivl_lab.bench.metadata [--quick] [--out DIR] [--device cpu]

"arrays" is the host's arithmetic alone: offsets, merge order, columns and rows. "on the device" takes them there, by
one copy each or one for all, and makes the angles. Both builders are compared bit for bit before they are timed. The
floor is the time to write the results once at the measured bandwidth.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..config import MoonViTConfig
from ..datasets import draw_sizes
from ..geometry import MERGE_KERNEL_SIZE, Grid, image_geometry, patch_counts
from ..measure.records import Recorder
from ..measure.roofline import copy_gbps
from ..moonvit.metadata import grid_arrays_reference, pack_grid_arrays
from ..moonvit.rope import Rope2DPosEmb
from . import command
from .compare import COLUMNS, Comparison

WORKLOADS = ("coco_val2017", "cameras", "receipts", "pew_charts")
IMAGES = (1, 4, 20)

Builder = Callable[[], dict[str, Tensor]]


def cases(quick: bool, seed: int) -> dict[str, list[Grid]]:
    """Batches by name."""
    return {
        f"{count} of {workload}": [image_geometry(*size).grid_hw for size in draw_sizes(workload, count, seed)]
        for workload in (WORKLOADS[:1] if quick else WORKLOADS)
        for count in IMAGES
    }


def array_builders(grids: list[Grid]) -> dict[str, Builder]:
    """The integers, on the host."""
    return {
        "plain": lambda: grid_arrays_reference(grids, len(grids), MERGE_KERNEL_SIZE),
        "packed": lambda: pack_grid_arrays(grids, len(grids), MERGE_KERNEL_SIZE).to("cpu"),
    }


def device_builders(grids: list[Grid], device: str) -> dict[str, Builder]:
    """The integers and the angles, on `device`."""
    rope = Rope2DPosEmb(MoonViTConfig.preset("kimi-vl-a3b").head_dim)

    def plain() -> dict[str, Tensor]:
        arrays = grid_arrays_reference(grids, len(grids), MERGE_KERNEL_SIZE)
        moved = {name: array.to(device) for name, array in arrays.items()}
        return {**moved, "cos_sin": rope.get_cos_sin(grids, device)}

    def packed() -> dict[str, Tensor]:
        moved = pack_grid_arrays(grids, len(grids), MERGE_KERNEL_SIZE).to(device)
        return {**moved, "cos_sin": rope.gather_cos_sin(moved["positions"], grids)}

    return {"plain": plain, "packed": packed}


def in_one(build: Builder) -> Tensor:
    """All that a builder makes, end to end in float64, which holds every value exactly."""
    return torch.cat([tensor.flatten().double() for _, tensor in sorted(build().items())])


@torch.inference_mode()
def run(options: argparse.Namespace, gbps: float) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """One record; returns the geometric-mean speed-ups over "plain" by phase, and the packed arrays' median times."""
    settings = command.settings(options, warmup=3, repeats=7 if options.quick else 31, copy_gbps=round(gbps, 1))
    speedups = {}
    with Recorder(
        "metadata", "mixed", COLUMNS, directory=options.out, device=options.device, settings=settings
    ) as record:
        for phase, device in (("arrays", "cpu"), ("on the device", options.device)):
            comparison = Comparison(record, "plain", gbps, 0.0, device, settings["warmup"], settings["repeats"])
            for case, grids in cases(options.quick, options.seed).items():
                command.progress(f"metadata, {phase}, {case}")
                builders = array_builders(grids) if phase == "arrays" else device_builders(grids, device)
                comparison.add(
                    f"{phase}: {case}",
                    {name: lambda build=build: build()["cu_seqlens"] for name, build in builders.items()},
                    in_one(builders["plain"]),
                    patches=sum(patch_counts(grids)),
                    bytes_moved=sum(tensor.nbytes for tensor in builders["plain"]().values()),
                    checks={name: partial(in_one, build) for name, build in builders.items()},
                )
            speedups[phase] = comparison.geometric_means()
    command.progress(f"wrote {record.path}")
    packed = [row for row in record.rows if row["variant"] == "packed" and row["case"].startswith("arrays")]
    return speedups, {row["case"]: row["latency_ms_p50"] for row in packed}


def main() -> None:
    options = command.parser("metadata", __doc__).parse_args()
    gbps = copy_gbps(options.device)
    speedups, milliseconds = run(options, gbps)
    command.finish({"benchmark": "metadata", "geometric_mean_speedup": speedups, "packed_ms_p50": milliseconds})


if __name__ == "__main__":
    main()
