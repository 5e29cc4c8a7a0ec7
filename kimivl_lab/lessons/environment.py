"""Whether the course runs here: one line a requirement, OK or FAIL with the cure.

`print_environment()` is in the first cell of the course; `python -m kimivl_lab.lessons.environment` does the same.
`environment()` gives it as data.
Test: tests/test_lessons.py, tests/test_workshop.py.
"""

import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from ..datasets import repository_root, sample_images
from ..measure.provenance import usable_cores

_LEAST_GIB = 3
_PACKAGES = ("torch", "transformers", "safetensors", "pillow", "numpy", "matplotlib")
_CURE = "run `make .venv` in the project's folder, then `make lab`"


class Requirement(NamedTuple):
    """One thing that the course needs: whether it is there, what was found, and what to do if it is not."""

    name: str
    ok: bool
    found: str
    cure: str


def environment() -> list[Requirement]:
    """Everything that the notebooks need, in the order in which a cure should be tried."""
    return [
        Requirement("Python 3.11 or newer", sys.version_info >= (3, 11), platform.python_version(), _CURE),
        *_packages(),
        _project(),
        Requirement(
            f"{_LEAST_GIB} GiB of memory", _memory_gib() >= _LEAST_GIB, f"{_memory_gib():.0f} GiB", "close programs"
        ),
        Requirement("2 processor cores", usable_cores() >= 2, f"{usable_cores()}", "expect twice the machine minutes"),
    ]


def print_environment() -> None:
    """Prints `environment()` and whether a GPU will be used, which the course does not need."""
    requirements = environment()
    for one in requirements:
        print(f"{'OK  ' if one.ok else 'FAIL'} {one.name:22s} {one.found}{'' if one.ok else f'  ->  {one.cure}'}")
    print(
        "    ", "GPU (optional)".ljust(22), torch.cuda.get_device_name() if torch.cuda.is_available() else "none: fine"
    )
    failed = sum(not one.ok for one in requirements)
    print("ready" if not failed else f"{failed} to mend before you go on")


def _packages() -> Iterator[Requirement]:
    tested = _tested_versions()
    for package in _PACKAGES:
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield Requirement(package, False, "not installed", _CURE)
            continue
        same = package not in tested or _release(found) == _release(tested[package])
        yield Requirement(package, same, found if same else f"{found}, tested with {tested[package]}", _CURE)


def _tested_versions() -> dict[str, str]:
    """Package -> version in constraints.txt; empty outside of the project's folder."""
    try:
        text = (repository_root() / "constraints.txt").read_text()
    except FileNotFoundError:
        return {}
    return {name.lower(): version for name, version in re.findall(r"^([\w.-]+)==([\w.]+)", text, re.MULTILINE)}


def _release(version: str) -> list[str]:
    """The first two numbers: 2.13.0+cpu and 2.13.1 are one release."""
    return version.split("+")[0].split(".")[:2]


def _project() -> Requirement:
    try:
        found = f"{len(sample_images())} sample images"
    except (FileNotFoundError, OSError):
        return Requirement("the project's data", False, "not found", "open the notebooks in a git clone of the project")
    return Requirement("the project's data", True, found, "")


def _memory_gib() -> float:
    """Memory that is free now, or all of it where the system does not say."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        available = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())
        if available:
            return int(available[1]) / 2**20
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


if __name__ == "__main__":
    print_environment()
