"""What the data sheets of GPUs promise: arithmetic p, memory bandwidth b, memory, and the link between GPUs.

A computation that does more than p/b FLOPs for each byte that it moves waits for arithmetic, another one for memory.
Example: H100 SXM, 989 TFLOP/s over 3,350 GB/s, is 295 FLOPs a byte. These are peaks; a server reaches a share of them.

Test: tests/test_gpus.py. Data: data/published/devices.csv.
"""

import csv
import re
from typing import NamedTuple

from .datasets import data_path

_OTHER_BOARDS = {"pcie", "nvl", "mig", "laptop", "max", "d"}  # the same chip, other numbers


class Gpu(NamedTuple):
    """One GPU.

    Attributes:
        flops_per_s: bfloat16 matrix products without sparsity.
        bytes_per_s: of its memory.
        memory_bytes: as the data sheet counts them, 80 GB is 80e9.
        link: how GPUs of one server reach each other: "NVLink", "PCIe" or "Infinity Fabric".
        link_bytes_per_s: that one GPU can send over all its links. Data sheets count both ways, which is twice that.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    memory_bytes: float
    link: str
    link_bytes_per_s: float
    source: str
    url: str

    @property
    def flops_per_byte(self) -> float:
        """p/b: FLOPs that the device can do while one byte moves."""
        return self.flops_per_s / self.bytes_per_s


def gpus() -> list[Gpu]:
    """The GPUs of data/published/devices.csv, in the order of the file."""
    with data_path("published", "devices.csv").open(newline="", encoding="utf-8") as file:
        return [
            Gpu(
                line["device"],
                float(line["bfloat16_tflops"]) * 1e12,
                float(line["memory_gbps"]) * 1e9,
                float(line["memory_gib"]) * 1e9,
                line["link"],
                float(line["link_gbps"]) * 1e9,
                line["source"],
                line["url"],
            )
            for line in csv.DictReader(file)
        ]


def find_gpu(name: str) -> Gpu:
    """The GPU that `name` means: "h100", "H100 SXM" and "NVIDIA H100 80GB HBM3" are one.

    A name that says another board of the chip ("H100 PCIe", "H100 NVL") is unknown: its numbers differ.

    Raises:
        ValueError: no GPU of the table; the message lists them.
    """
    words = re.findall(r"[a-z]+\d+[a-z]*|\d+[a-z]*|[a-z]+", name.lower())
    for gpu in gpus():
        chip = next(word for word in gpu.name.lower().split() if any(map(str.isdigit, word)))
        if chip in words and not _OTHER_BOARDS & set(words) and ("pro" in words) == ("PRO" in gpu.name):
            return gpu
    raise ValueError(f"unknown GPU {name[:80]!r}: one of {', '.join(gpu.name for gpu in gpus())}")
