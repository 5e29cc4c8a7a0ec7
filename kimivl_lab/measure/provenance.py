"""Where a number comes from: commit, command, device and versions.

Test: tests/test_records.py.
"""

import datetime
import importlib.metadata
import math
import os
import platform
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ..kernels.library import LIBRARIES, BuildError, kernel_isa

_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
_PACKAGES = ("torch", "transformers", "numpy", "pillow", "flash-attn")


def device_name(device: torch.device | str = "cpu") -> str:
    """The device's name for people: the GPU, or the processor with its usable cores."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_model()}, {usable_cores()} cores"


def device_slug(device: torch.device | str = "cpu") -> str:
    """`device_name` as a part of a file name: lower case letters, digits and dashes."""
    name = re.sub(r"\((r|tm|c)\)|processor|cpu|@.*?hz", " ", device_name(device).lower())
    prefix = "cpu-" if torch.device(device).type == "cpu" else ""
    return prefix + re.sub(r"[^a-z0-9]+", "-", name).strip("-")


def instruction_set() -> str:
    """The highest instruction set of this processor that a kernel of ours uses: "amx", "avx512", "avx2" or "none"."""
    for name in LIBRARIES:
        with suppress(BuildError):
            return kernel_isa(name)
    return "none"


def usable_cores() -> int:
    """Cores that this process may use: those it may run on, or a container's share of their time, rounded up."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, _cpu_quota())))


def _cpu_quota() -> float:
    """Cores' worth of time that Linux gives to this container (docker --cpus, a limit of Kubernetes); inf for all."""
    try:
        quota, period = _CPU_MAX.read_text("ascii").split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # not Linux, no limit ("max"), or the files of an older kernel
        return math.inf


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that numbers depend on; a missing package is left out."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def provenance(device: torch.device | str = "cpu", **settings: Any) -> dict[str, Any]:
    """The origin of a record, ready for JSON. `settings`: warmup, repeats, seed, timer and so on."""
    device = torch.device(device)
    origin: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no", "--", ":(top,exclude)data/measurements")),
        "command": _command(),
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": versions(),
    }
    if device.type == "cuda":
        origin["cuda"] = torch.version.cuda
        origin |= _nvidia_smi()
    else:
        origin["isa"] = instruction_set()
    return origin | settings


def _command() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.name:
        program = f"python -m {spec.name.removesuffix('.__main__')}"
    else:
        program = Path(sys.argv[0]).name
    return " ".join([program, *sys.argv[1:]])


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and (match := re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text(encoding="utf-8"))):
        return match[1].strip()
    return platform.processor() or platform.machine()


def _git(*arguments: str) -> str | None:
    root = Path(__file__).resolve().parents[2]
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _nvidia_smi() -> dict[str, str]:
    fields = ("driver_version", "clocks.sm", "clocks.mem", "power.limit")
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        first = subprocess.run(query, capture_output=True, text=True, timeout=10).stdout.strip().splitlines()[0]
    except (OSError, IndexError, subprocess.TimeoutExpired):
        return {}
    return dict(zip(fields, (value.strip() for value in first.split(",")), strict=False))
