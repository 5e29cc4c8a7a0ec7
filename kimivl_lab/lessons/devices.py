"""What the data sheets of four GPUs promise: arithmetic p, memory bandwidth b, and their ratio p/b.

Use `devices()` to say what a computation waits for: one that does more than p/b FLOPs for each byte that it moves waits
for arithmetic, another one for memory. Example: H100 SXM, 989 TFLOP/s over 3,350 GB/s, is 295 FLOPs a byte.
Test: tests/test_lessons.py. Data: data/published/devices.csv.
"""

import csv
from typing import NamedTuple

from ..datasets import data_path


class Device(NamedTuple):
    """A device's speeds: bfloat16 matrix products without sparsity, and its memory's bandwidth."""

    name: str
    flops_per_s: float
    bytes_per_s: float

    @property
    def flops_per_byte(self) -> float:
        """p/b: FLOPs that the device can do while one byte moves."""
        return self.flops_per_s / self.bytes_per_s


def devices() -> list[Device]:
    """The GPUs of data/published/devices.csv, in the order of the file."""
    with data_path("published", "devices.csv").open(newline="") as file:
        return [
            Device(line["device"], float(line["bfloat16_tflops"]) * 1e12, float(line["memory_gbps"]) * 1e9)
            for line in csv.DictReader(file)
        ]
