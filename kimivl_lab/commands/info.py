"""`kimivl-lab info`: the machine, the versions, and which kernels run here in bfloat16.

Test: tests/test_cli.py.
"""

import argparse

import torch
from rich.table import Table

from ..kernels.dispatch import compile_unavailable
from ..kernels.packed_linear import PACKED_KERNELS, packed_unavailable
from ..measure.provenance import device_name, versions
from ..moonvit.attention import ATTENTION_BACKENDS, attention_unavailable
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
    for name in ATTENTION_BACKENDS:
        table.add_row(f"attention {name}", attention_unavailable(name, device, torch.bfloat16) or "runs here")
    table.add_row("torch.compile", compile_unavailable(device) or "can compile here")
    for name in PACKED_KERNELS:
        table.add_row(f"linear {name}", packed_unavailable(name, device, torch.bfloat16) or "runs here")
    show(table)
    return 0
