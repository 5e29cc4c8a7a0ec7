"""Pictures to patches: the image processor beside the reference written step by step, on the same photographs.

    python -m kimivl_lab.bench.preprocess [--quick] [--out DIR]

Every variant is compared with the reference bit for bit (the uint8 one after normalising) before it is timed, and all
variants of a case run in turn, on the host. The floor is the time to read the pixels as uint8 and write the patches as
float32 once at this machine's measured copy bandwidth; decoding and resizing have no such floor and come on top.
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ..datasets import draw_sizes, sample_images
from ..images.processor import KimiVLImageProcessor
from ..measure.records import Recorder
from ..measure.roofline import copy_gbps
from . import command
from .compare import COLUMNS, Comparison
from .preprocess_reference import reference_preprocess

PHOTOGRAPHS = ("astronaut", "chelsea", "china", "coffee")
REFERENCES = ("reference", "reference_one_thread")

Source = Image.Image | Path


def photographs(workload: str, count: int, seed: int) -> list[Image.Image]:
    """`count` sample photographs, decoded, mode RGB, resampled to sizes drawn from a workload."""
    files = sample_images()
    sources = [Image.open(files[name]).convert("RGB") for name in PHOTOGRAPHS]
    sizes = draw_sizes(workload, count, seed)
    return [sources[index % len(sources)].resize(size) for index, size in enumerate(sizes)]


def save_jpegs(images: Sequence[Image.Image], folder: Path) -> list[Path]:
    """The pictures as JPEG files of quality 90."""
    paths = [folder / f"{index:03d}.jpg" for index in range(len(images))]
    for image, path in zip(images, paths, strict=True):
        image.save(path, quality=90)
    return paths


def reference(sources: Sequence[Source]) -> Tensor:
    """The pixel values; files are opened and decoded anew."""
    return reference_preprocess(Image.open(item) if isinstance(item, Path) else item for item in sources)[0]


def reference_one_thread(sources: Sequence[Source]) -> Tensor:
    """The same with torch kept to one thread, which is faster where other programs use the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return reference(sources)
    finally:
        torch.set_num_threads(threads)


def variants(sources: Sequence[Source]) -> dict[str, Callable[[], Tensor]]:
    """Everything that is timed, by name."""
    processor = KimiVLImageProcessor()
    return {
        "reference": lambda: reference(sources),
        "reference_one_thread": lambda: reference_one_thread(sources),
        "float32": lambda: processor(sources).pixel_values,
        "float32_one_thread": lambda: processor(sources, num_threads=1).pixel_values,
        "uint8": lambda: processor(sources, return_uint8=True).pixel_values,
    }


def add_case(comparison: Comparison, case: str, sources: Sequence[Source]) -> None:
    """Checks and times one list of pictures."""
    runs = variants(sources)
    want = reference(sources)
    comparison.add(
        case,
        runs,
        want,
        patches=len(want),
        bytes_moved=want.numel() * (1 + want.element_size()),
        checks=runs | {"uint8": lambda: (runs["uint8"]().float() / 255 - 0.5) / 0.5},
    )


def least_speedups(comparison: Comparison) -> dict[str, float]:
    """Of each variant, the least over the cases, against whichever reference was faster there."""
    alone = comparison.ratios["reference_one_thread"]
    return {
        name: round(min(ratio / max(1, other) for ratio, other in zip(ratios, alone, strict=True)), 2)
        for name, ratios in comparison.ratios.items()
        if name not in REFERENCES
    }


def main() -> None:
    options = command.parser("preprocess", __doc__).parse_args()
    options.device = "cpu"  # the processor's output stays on the host
    gbps = copy_gbps(options.device)
    settings: dict[str, Any] = command.settings(
        options, warmup=1 if options.quick else 3, repeats=5 if options.quick else 21, copy_gbps=round(gbps, 1)
    )
    small = photographs("coco_val2017", 32, options.seed)
    large = photographs("document_photos", 8, options.seed)
    with (
        tempfile.TemporaryDirectory() as folder,
        Recorder("preprocess", "mixed", COLUMNS, directory=options.out, settings=settings) as record,
    ):
        comparison = Comparison(record, "reference", gbps, 0.0, "cpu", settings["warmup"], settings["repeats"])
        cases: dict[str, Sequence[Source]] = {
            "32 of coco_val2017, decoded": small,
            "32 of coco_val2017, JPEG files": save_jpegs(small, Path(folder)),
            "8 of document_photos, decoded": large,
        }
        for case, sources in cases.items():
            command.progress(f"preprocess {case}")
            add_case(comparison, case, sources)
    command.progress(f"wrote {record.path}")
    command.finish(
        {
            "benchmark": "preprocess",
            "copy_gbps": round(gbps, 1),
            "geometric_mean_speedup": comparison.geometric_means(),
            "least_speedup_over_the_faster_reference": least_speedups(comparison),
        }
    )


if __name__ == "__main__":
    main()
