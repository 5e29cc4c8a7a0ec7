"""The ladder: from the encoder as it was first served to this one, one optimisation a rung, on the same images.

    python -m kimivl_lab.bench.ladder [--preset lab] [--dtype float32] [--quick] [--out DIR] [--device cpu]

The first rung, "before", has one mask over all images, reads the longest image's length in every layer, interpolates
the position table at every call, applies complex rope to float32 copies, embeds by a strided convolution, and merges
image by image. Each rung changes one thing, except that all kernels of the last CPU rung come together. Every rung is
compared with the float32 reference before any is timed. A rung that does not pay on this machine stays.

Test: tests/test_benchmarks.py. Record: ladder__*.csv.
"""

import argparse
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..config import EncoderOptions
from ..datasets import sample_images
from ..geometry import as_grid_list, token_counts
from ..graphs.runner import EncoderCudaGraphRunner
from ..images.processor import KimiVLImageProcessor
from ..kernels.packed_linear import PACKED_KERNELS, packed_unavailable
from ..kernels.rotation import resolve_rotation
from ..lessons.grids_on_device import reading_the_bound
from ..measure.accuracy import checked_errors
from ..measure.memory import peak_memory_mib
from ..moonvit.attention import attention_unavailable, resolve_attention, sdpa_attention
from ..moonvit.layers import ResolvedOptions
from ..moonvit.merger import patch_merger, patch_merger_packed
from ..moonvit.model import MoonVitPretrainedModel
from . import harness
from .compare import time_variants, variant_rows
from .towers import drawn_grids, noise, reference_and_tower

TOLERANCE = {"float32": 1e-5, "bfloat16": 0.05}
QUICK_IMAGES = ("astronaut", "coffee", "china")
COLUMNS = harness.columns("images patches peak_mem_mib")


@dataclass(frozen=True)
class Rung:
    """One way to run the tower; the fields are what the rungs change."""

    name: str
    attention: str = "sdpa_masked"
    bound_per_layer: bool = True
    position: str = "interpolate"
    rope: str = "complex"
    convolution: bool = True
    packed_merge: bool = False
    linear: str = "plain"
    raised: bool = False
    graphs: bool = False


def rungs(device: torch.device, dtype: torch.dtype) -> list[Rung]:
    """From first to last; kernels and graphs only where this machine has them."""
    ladder, on_cpu = [Rung("before")], device.type == "cpu"

    def step(name: str, **changes: object) -> None:
        ladder.append(replace(ladder[-1], name=name, **changes))

    step("attention per image", attention="sdpa" if on_cpu else "auto")
    step("metadata built once", bound_per_layer=False, packed_merge=True)
    step("separable position operator", position="adaptive")
    step("position cache", position="cached")
    step("fused rope", rope="in_place" if on_cpu else "auto")
    step("linear patch embedding", convolution=False)
    if packed_unavailable("prepacked", device, dtype) is None:
        step("fused, prepacked layers", linear="prepacked")
    if packed_unavailable("amx", device, dtype) is None:
        step("kernels for AMX", linear="amx", attention="amx", rope="amx")
    elif attention_unavailable("simd", device, dtype) is None:
        step("attention kernel for AVX", attention="simd")
    elif ResolvedOptions.resolve(EncoderOptions(), device, dtype).raised is not None:
        step("computed in float32", raised=True)
    if resolve_attention("auto", device, dtype) is not sdpa_attention or on_cpu:
        step("graphs", graphs=True)
    return ladder


def graph_runner(tower: MoonVitPretrainedModel, grid_hws: Tensor) -> EncoderCudaGraphRunner:
    """One graph, as large as this batch."""
    tokens = sum(token_counts(as_grid_list(grid_hws), tower.config.merge_kernel_size))
    return EncoderCudaGraphRunner(tower, [tokens], max_images=len(grid_hws))


def encode(
    tower: MoonVitPretrainedModel,
    pixels: Tensor,
    grid_hws: Tensor,
    rung: Rung,
    runner: EncoderCudaGraphRunner | None = None,
) -> Tensor:
    """The tower's forward, as `rung` runs it: (T, 4, D). `runner`: holds its graphs; None makes one."""
    tower.set_options(position=rung.position)
    if rung.graphs:
        return (runner or graph_runner(tower, grid_hws))(pixels, grid_hws)
    if rung.raised:
        return tower(pixels, grid_hws)
    metadata = tower.prepare_encoder_metadata(grid_hws)
    if rung.convolution:
        x = tower.patch_embed.proj(pixels.to(tower.dtype)).flatten(1) + metadata.pos_embeds
    else:
        x = tower.patch_embed(pixels, metadata.pos_embeds)
    attend = resolve_attention(rung.attention, tower.device, tower.dtype)
    rotate = resolve_rotation(rung.rope, tower.device, tower.dtype)
    linear = PACKED_KERNELS.get(rung.linear)
    kernels = ResolvedOptions(rotate, reading_the_bound(attend) if rung.bound_per_layer else attend, linear)
    x = tower.encoder(x, metadata, kernels)
    if rung.packed_merge:
        return patch_merger_packed(x, metadata.merge_gather_idx, tower.config.merge_size)
    return torch.cat(patch_merger(x, as_grid_list(grid_hws.tolist()), tower.config.merge_kernel_size))


def batches(quick: bool, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """(pixel values, grids) by name: photographs (all sample images unless `quick`), 8 images of COCO's sizes."""
    files = sample_images()
    names = QUICK_IMAGES if quick else tuple(files)
    photographs = KimiVLImageProcessor()([files[name] for name in names])
    found = {f"{len(names)} sample images": (photographs.pixel_values, photographs.image_grid_hws)}
    if not quick:
        grids = drawn_grids("coco_val2017", 8, seed)
        found["8 images of COCO's sizes"] = (noise(grids, seed), torch.tensor(grids, device="cpu"))
    return found


@torch.no_grad()  # weights made in inference mode are cached nowhere on a GPU
def rows(options: argparse.Namespace) -> Iterator[harness.Row]:
    """The rows of one record: of each batch every rung, checked and then timed."""
    exact, tower = reference_and_tower(options)
    ladder = rungs(tower.device, tower.dtype)
    towers = {linear: copy.deepcopy(tower) for linear in {rung.linear for rung in ladder}}  # one packed copy a tower
    for case, (pixels, grids) in batches(options.quick, options.seed).items():
        harness.progress(f"ladder {options.preset} {options.dtype}: {case}")
        pixels = pixels.to(tower.device)
        runner = graph_runner(towers[ladder[-1].linear], grids)
        runs = {rung.name: partial(encode, towers[rung.linear], pixels, grids, rung, runner) for rung in ladder}
        errors = checked_errors(runs, exact(pixels, grids), TOLERANCE[options.dtype])
        memory = {name: peak_memory_mib(run, tower.device) for name, run in runs.items()}  # with the check: a warm-up
        timings = time_variants(options, case, runs, warmup=0, on_round=harness.rounds(options))
        for row in variant_rows(case, timings, errors, "before"):
            used = memory[row["variant"]]
            yield row | {"images": len(grids), "patches": len(pixels), "peak_mem_mib": used and round(used, 1)}


def summary(rows: list[harness.Row]) -> dict[str, Any]:
    """Each batch's speed-up on the last rung."""
    return {"total_speedup": {row["case"]: row["speedup_ratio"] for row in rows}}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser("ladder", __doc__, dtypes=TOLERANCE, default=("float32",), preset="lab", rounds=(2, 9, 3))
    harness.run_benchmark(parser, COLUMNS, rows, summary, arguments)


if __name__ == "__main__":
    main()
