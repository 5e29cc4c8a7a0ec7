"""Whether the course runs here: one line a requirement, OK or FAIL with the cure.

`print_environment()` is in the first cell of the course; `python -m kimivl_lab.lessons.environment` does the same.
`environment()` gives it as data.
Test: tests/test_lessons.py, tests/test_workshop.py.
"""

import contextlib
import importlib.metadata
import math
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
_MEMORY_MAX = Path("/sys/fs/cgroup/memory.max")  # a container's limit; /proc/meminfo is the whole machine
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
        _memory(),
        Requirement("2 processor cores", usable_cores() >= 2, f"{usable_cores()}", "expect twice the machine minutes"),
        _threads(),
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
        text = (repository_root() / "constraints.txt").read_text(encoding="utf-8")
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


def _memory() -> Requirement:
    """Memory that is free now, or all of it where the system does not say; at most a container's limit."""
    name, gib = f"{_LEAST_GIB} GiB of memory", None
    with contextlib.suppress(OSError):
        if available := re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text("ascii")):
            gib = int(available[1]) / 2**20
    if gib is None and hasattr(os, "sysconf"):  # macOS
        gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        gib = min(gib or math.inf, int(_MEMORY_MAX.read_text("ascii")) / 2**30)
    if gib is None:
        return Requirement(name, True, "not told here", "")
    return Requirement(name, gib >= _LEAST_GIB, f"{gib:.1f} GiB", "close programs")


def _threads() -> Requirement:
    """More threads than cores wait for each other: torch does not see how much of the cores a container may use."""
    threads, cores = torch.get_num_threads(), usable_cores()
    cure = f"set OMP_NUM_THREADS={cores} and start Jupyter again"
    return Requirement("cores for all threads", threads <= cores, f"{threads} on {cores} cores", cure)


if __name__ == "__main__":
    print_environment()
