"""Peak memory of one call, above the memory in use before it.

Test: tests/test_memory.py.
"""

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_memory_mib(run: Callable[[], object], device: torch.device | str = "cpu") -> float | None:
    """MiB that `run` needs at its peak: allocated on a GPU, resident on Linux; None where neither can be read."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    if not _CLEAR.exists():  # macOS, Windows
        return None
    _give_back_freed_memory()
    try:
        _CLEAR.write_text("5", encoding="utf-8")  # sets the peak back to what is resident now
    except OSError:
        return None
    before = _resident_kib("VmRSS")
    run()
    return max(0, _resident_kib("VmHWM") - before) / 1024


def _give_back_freed_memory() -> None:
    """Returns freed memory to the system: it stays resident otherwise and hides what the next call needs."""
    gc.collect()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _resident_kib(field: str) -> int:
    match = re.search(rf"{field}:\s+(\d+) kB", _STATUS.read_text(encoding="utf-8"))
    assert match is not None
    return int(match[1])
