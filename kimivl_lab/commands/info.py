"""`kimivl-lab info`: the machine, the versions, which kernels run here, and which of them a tower uses.

Test: tests/test_cli.py.
"""

import argparse
from collections.abc import Callable

import torch
from rich.table import Table

from ..config import EncoderOptions
from ..kernels.dispatch import compile_unavailable
from ..kernels.packed_linear import PACKED_KERNELS, packed_unavailable
from ..measure.provenance import device_name, versions
from ..moonvit.attention import ATTENTION_BACKENDS, attention_unavailable
from ..moonvit.layers import ResolvedOptions
from .output import show


def run(arguments: argparse.Namespace) -> int:
    """Prints the table; a kernel that does not run here has its reason."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    table = Table(show_header=False, box=None)
    table.add_row("processor", device_name("cpu"))
    table.add_row("threads", str(torch.get_num_threads()))
    gpus = [device_name(f"cuda:{index}") for index in range(torch.cuda.device_count())]
    table.add_row("GPU", ", ".join(gpus) or "none that torch can use")
    for package, version in versions().items():
        table.add_row(package, version)
    for dtype in (torch.bfloat16, torch.float32):
        with torch.no_grad():
            chosen = ResolvedOptions.resolve(EncoderOptions(), device, dtype)
        table.add_row(f"{_name(dtype)} tower", f"computes in {chosen.names(dtype)}")
    for name in ATTENTION_BACKENDS:
        table.add_row(f"attention {name}", _where(attention_unavailable, name, device))
    table.add_row("torch.compile", compile_unavailable(device) or "can compile here")
    for name in PACKED_KERNELS:
        table.add_row(f"linear {name}", _where(packed_unavailable, name, device))
    show(table)
    return 0


def _where(unavailable: Callable[[str, torch.device, torch.dtype], str | None], name: str, device: torch.device) -> str:
    """In which dtypes a kernel runs here, or why in none."""
    reasons = {dtype: unavailable(name, device, dtype) for dtype in (torch.bfloat16, torch.float32)}
    running = [_name(dtype) for dtype, reason in reasons.items() if reason is None]
    if running:
        return f"runs here in {' and '.join(running)}"
    return "; ".join(dict.fromkeys(filter(None, reasons.values())))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
