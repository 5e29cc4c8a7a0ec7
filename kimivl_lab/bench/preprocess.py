"""Images to patches: the image processor beside the reference written step by step, on the same photographs.

    python -m kimivl_lab.bench.preprocess [--quick] [--out DIR]

Every variant is compared with the reference bit for bit (the uint8 one after normalising) before it is timed, on the
host. The floor is the time to read the pixels as uint8 and to write the patches as float32 once, at this machine's copy
bandwidth. Decoding and resizing have no such floor and come on top.

Test: tests/test_benchmarks.py. Record: preprocess__*.csv.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ..datasets import draw_sizes, sample_images
from ..images.processor import KimiVLImageProcessor
from . import harness
from .compare import COLUMNS, compare, geometric_means
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
    """The images as JPEG files of quality 90."""
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


def normalised(uint8: Callable[[], Tensor]) -> Tensor:
    """What `uint8` gives, as the float32 patches that it stands for."""
    return (uint8().float() / 255 - 0.5) / 0.5


def rows(options: argparse.Namespace) -> Iterator[harness.Row]:
    """The rows of one record."""
    small = photographs("coco_val2017", 32, options.seed)
    large = photographs("document_photos", 8, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        cases: dict[str, Sequence[Source]] = {
            "32 of coco_val2017, decoded": small,
            "32 of coco_val2017, JPEG files": save_jpegs(small, Path(folder)),
            "8 of document_photos, decoded": large,
        }
        for case, sources in cases.items():
            runs, want = variants(sources), reference(sources)
            yield from compare(
                options,
                case,
                runs,
                want,
                baseline="reference",
                tolerance=0.0,
                patches=len(want),
                bytes_moved=want.numel() * (1 + want.element_size()),
                checks=runs | {"uint8": partial(normalised, runs["uint8"])},
            )


def summary(rows: list[harness.Row]) -> dict[str, Any]:
    """Mean speed-ups, and the least speed-up of each variant over whichever reference was faster in that case."""
    alone = {row["case"]: row["speedup_ratio"] for row in rows if row["variant"] == "reference_one_thread"}
    least: dict[str, float] = {}
    for row in rows:
        if row["variant"] not in REFERENCES:
            ratio = row["speedup_ratio"] / max(1, alone[row["case"]])
            least[row["variant"]] = round(min(ratio, least.get(row["variant"], ratio)), 2)
    return {"geometric_mean_speedup": geometric_means(rows), "least_speedup_over_the_faster_reference": least}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser("preprocess", __doc__, dtypes=("mixed",), rounds=(3, 21, 5), on_host=True)
    harness.run_benchmark(parser, COLUMNS, rows, summary, arguments, yardsticks=harness.copy_rate)


if __name__ == "__main__":
    main()
