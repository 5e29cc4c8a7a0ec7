"""Encoder metadata: building the arrays of a batch plainly and in one buffer, on batches of real sizes.

    python -m kimivl_lab.bench.metadata [--quick] [--out DIR] [--device cpu]

The phase "arrays" is the arithmetic on the host alone: offsets, merge order, columns and rows. The phase "on the
device" also copies the arrays there, one copy each or one for all, and computes the angles. Both builders are compared
bit for bit before they are timed. The floor is the time to write the results once, at this machine's copy bandwidth.

Test: tests/test_benchmarks.py. Record: metadata__*.csv.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..config import MoonViTConfig
from ..geometry import MERGE_KERNEL_SIZE, Grid, patch_counts
from ..moonvit.metadata import grid_arrays_reference, pack_grid_arrays
from ..moonvit.rope import Rope2DPosEmb
from . import harness
from .compare import COLUMNS, compare, geometric_means
from .towers import drawn_grids

WORKLOADS = ("coco_val2017", "cameras", "receipts", "pew_charts")
IMAGES = (1, 4, 20)

Builder = Callable[[], dict[str, Tensor]]


def cases(quick: bool, seed: int) -> dict[str, list[Grid]]:
    """Batches by name."""
    return {
        f"{count} of {workload}": drawn_grids(workload, count, seed)
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
def rows(options: argparse.Namespace) -> Iterator[harness.Row]:
    """The rows of one record."""
    for phase, device in (("arrays", "cpu"), ("on the device", options.device)):
        for case, grids in cases(options.quick, options.seed).items():
            builders = array_builders(grids) if phase == "arrays" else device_builders(grids, device)
            yield from compare(
                options,
                f"{phase}: {case}",
                {name: lambda build=build: build()["cu_seqlens"] for name, build in builders.items()},
                in_one(builders["plain"]),
                baseline="plain",
                tolerance=0.0,
                patches=sum(patch_counts(grids)),
                bytes_moved=sum(tensor.nbytes for tensor in builders["plain"]().values()),
                checks={name: partial(in_one, build) for name, build in builders.items()},
                device=device,
            )


def summary(rows: list[harness.Row]) -> dict[str, Any]:
    """Mean speed-ups of each phase, and the packed arrays' median times."""
    phases: dict[str, list[harness.Row]] = {}
    for row in rows:
        phases.setdefault(row["case"].partition(":")[0], []).append(row)
    packed = [row for row in phases["arrays"] if row["variant"] == "packed"]
    return {
        "geometric_mean_speedup": {phase: geometric_means(found) for phase, found in phases.items()},
        "packed_ms_p50": {row["case"]: row["latency_ms_p50"] for row in packed},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser("metadata", __doc__, dtypes=("mixed",), rounds=(3, 31, 7))
    harness.run_benchmark(parser, COLUMNS, rows, summary, arguments, yardsticks=harness.copy_rate)


if __name__ == "__main__":
    main()
