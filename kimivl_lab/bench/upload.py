"""Pixels to the device and through the patch embedding: float32, bfloat16 and raw uint8 patches.

    python -m kimivl_lab.bench.upload [--quick] [--out DIR] [--device cuda]

uint8 patches have a quarter of float32's bytes; their normalisation is folded into the patch embedding. Each variant
starts in pinned host memory (in pageable memory on a CPU, where nothing is copied) and ends with the embedded patches.
Each is compared with the float64 result before it is timed. The floor is the time to copy the uint8 patches.

Test: tests/test_benchmarks.py. Record: upload__*.csv, from a GPU.
"""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from ..config import MoonViTConfig
from ..measure.roofline import copy_gbps
from ..measure.timing import time_interleaved
from ..moonvit.patch_embed import MoonVisionPatchEmbed
from . import harness
from .compare import COLUMNS, compare, mean_speedups

PATCHES = (1024, 4096, 16384)
TOLERANCE = 0.02


def upload_rate(options: argparse.Namespace) -> dict[str, float]:
    """Measured GB/s of a large pinned copy to the device; on a CPU, which uploads nothing, of a copy in memory."""
    device = torch.device(options.device)
    if device.type == "cpu":
        return {"upload_gbps": round(copy_gbps(device), 2)}
    host = torch.ones(64 * 2**20, dtype=torch.uint8, device="cpu").pin_memory()
    timing = time_interleaved({"copy": lambda: host.to(device, non_blocking=True)}, device=device, repeats=10)
    return {"upload_gbps": round(host.nbytes / timing["copy"].p20_ms / 1e6, 2)}


@torch.inference_mode()
def rows(options: argparse.Namespace) -> Iterator[harness.Row]:
    """The rows of one record."""
    device = torch.device(options.device)
    torch.manual_seed(options.seed)
    embed = MoonVisionPatchEmbed(MoonViTConfig.preset("kimi-vl-a3b")).eval()
    assert embed.proj.bias is not None
    weight, bias = embed.proj.weight.double().flatten(1), embed.proj.bias.double()
    embed = embed.bfloat16().to(device)

    def embedded(host: Tensor) -> Tensor:
        return embed.project(host.to(device, non_blocking=True))

    for patches in PATCHES[:2] if options.quick else PATCHES:
        raw = torch.randint(0, 256, (patches, 3, 14, 14), dtype=torch.uint8, device="cpu")
        normalised = (raw.float() / 255 - 0.5) / 0.5
        hosts = {"float32": normalised, "bfloat16": normalised.bfloat16(), "uint8": raw}
        if device.type == "cuda":
            hosts = {name: host.pin_memory() for name, host in hosts.items()}
        yield from compare(
            options,
            f"{patches} patches",
            {name: partial(embedded, host) for name, host in hosts.items()},
            (normalised.double().flatten(1) @ weight.T + bias).to(device),
            baseline="float32",
            tolerance=TOLERANCE,
            patches=patches,
            bytes_moved=raw.nbytes,
            gbps=options.upload_gbps,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser("upload", __doc__, dtypes=("bfloat16",), rounds=(3, 21, 7))
    harness.run_benchmark(parser, COLUMNS, rows, mean_speedups, arguments, yardsticks=upload_rate)


if __name__ == "__main__":
    main()
