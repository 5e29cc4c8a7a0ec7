"""Pixels to the device and through the patch embedding: float32, bfloat16 and raw uint8 patches.

    python -m kimivl_lab.bench.upload [--quick] [--out DIR] [--device cuda]

uint8 patches carry a quarter of float32's bytes, their normalisation folded into the patch embedding. Each way starts
from pinned host memory (pageable on a CPU, where nothing is uploaded) and ends with the embedded patches; each is
compared with the float64 result before it is timed. The floor is the copy of uint8's bytes at the measured rate.
"""

import argparse

import torch
from torch import Tensor

from ..config import MoonViTConfig
from ..measure.records import Recorder
from ..measure.roofline import copy_gbps
from ..measure.timing import time_interleaved
from ..moonvit.patch_embed import MoonVisionPatchEmbed
from . import command
from .compare import COLUMNS, Comparison

PATCHES = (1024, 4096, 16384)
TOLERANCE = 0.02


def upload_gbps(device: torch.device) -> float:
    """Measured GB/s of a large pinned copy to the device; a CPU's own copy rate where there is none."""
    if device.type == "cpu":
        return copy_gbps(device)
    host = torch.ones(64 * 2**20, dtype=torch.uint8).pin_memory()
    timing = time_interleaved({"copy": lambda: host.to(device, non_blocking=True)}, device=device, repeats=10)
    return host.nbytes / timing["copy"].p20_ms / 1e6


@torch.inference_mode()
def run(options: argparse.Namespace, gbps: float) -> dict[str, float]:
    """One record; returns the geometric-mean speed-ups over float32 patches."""
    device = torch.device(options.device)
    torch.manual_seed(options.seed)
    embed = MoonVisionPatchEmbed(MoonViTConfig.preset("kimi-vl-a3b")).eval()
    exact = embed.proj.weight.double().flatten(1)
    embed = embed.bfloat16().to(device)
    settings = command.settings(options, warmup=3, repeats=7 if options.quick else 21, upload_gbps=round(gbps, 2))
    with Recorder("upload", "bfloat16", COLUMNS, directory=options.out, device=device, settings=settings) as record:
        comparison = Comparison(
            record, "float32", gbps, TOLERANCE, options.device, settings["warmup"], settings["repeats"]
        )
        for patches in PATCHES[:2] if options.quick else PATCHES:
            command.progress(f"upload {patches} patches")
            raw = torch.randint(0, 256, (patches, 3, 14, 14), dtype=torch.uint8)
            normalised = (raw.float() / 255 - 0.5) / 0.5
            hosts = {"float32": normalised, "bfloat16": normalised.bfloat16(), "uint8": raw}
            if device.type == "cuda":
                hosts = {name: host.pin_memory() for name, host in hosts.items()}

            def embedded(host: Tensor) -> Tensor:
                return embed.project(host.to(device, non_blocking=True))

            assert embed.proj.bias is not None
            want = normalised.double().flatten(1) @ exact.T + embed.proj.bias.double().cpu()
            comparison.add(
                f"{patches} patches",
                {name: lambda host=host: embedded(host) for name, host in hosts.items()},
                want.to(device),
                patches=patches,
                bytes_moved=raw.nbytes,
            )
    command.progress(f"wrote {record.path}")
    return comparison.geometric_means()


def main() -> None:
    options = command.parser("upload", __doc__).parse_args()
    gbps = upload_gbps(torch.device(options.device))
    command.finish({"benchmark": "upload", "upload_gbps": round(gbps, 2), "geometric_mean_speedup": run(options, gbps)})


if __name__ == "__main__":
    main()
