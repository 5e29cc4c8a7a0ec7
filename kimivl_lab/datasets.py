"""Reads what data/ holds: sample images, and the image sizes of real workloads.

Test: tests/test_datasets.py.
"""

import csv
import random
from pathlib import Path

WORKLOADS = {
    "coco_val2017": "photographs (COCO)",
    "cameras": "camera files",
    "clipart": "clip art",
    "pew_charts": "charts",
    "receipts": "receipt scans",
    "document_photos": "document photos",
    "device_screens": "device screens",
}


def repository_root() -> Path:
    """The checkout of this project. FileNotFoundError if there is none.

    It is the nearest folder with a `pyproject.toml` and a `data` folder above this file, or above the current folder
    where the package is installed elsewhere.
    """
    for start in (Path(__file__).resolve().parent, Path.cwd()):
        for folder in (start, *start.parents):
            if (folder / "pyproject.toml").is_file() and (folder / "data").is_dir():
                return folder
    raise FileNotFoundError("no checkout of kimivl_lab found: its data/ folder is not part of the installed package")


def data_path(*parts: str) -> Path:
    """A path under data/. FileNotFoundError if it does not exist."""
    path = repository_root().joinpath("data", *parts)
    if not path.exists():
        raise FileNotFoundError(f"data/{'/'.join(parts)} does not exist")
    return path


def sample_images() -> dict[str, Path]:
    """The sample images by the name of their file without its ending, in alphabetical order."""
    folder = data_path("images")
    return {path.stem: path for path in sorted(folder.iterdir()) if path.suffix in {".jpg", ".png"}}


def load_sizes(workload: str) -> list[tuple[int, int, int]]:
    """(width, height, count) of every distinct image size of a workload, in pixels, EXIF rotation applied.

    Args:
        workload: a key of `WORKLOADS`.
    """
    if workload not in WORKLOADS:
        raise ValueError(f"unknown workload {workload!r}: one of {', '.join(WORKLOADS)}")
    with data_path("workloads", f"{workload}.csv").open(newline="", encoding="utf-8") as file:
        return [(int(line["width"]), int(line["height"]), int(line["count"])) for line in csv.DictReader(file)]


def draw_sizes(workload: str, count: int, seed: int = 0) -> list[tuple[int, int]]:
    """`count` image sizes (width, height) drawn from a workload by frequency; the same for the same seed."""
    sizes = load_sizes(workload)
    return random.Random(seed).choices([size[:2] for size in sizes], [size[2] for size in sizes], k=count)
