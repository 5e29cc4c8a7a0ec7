"""The four GPUs that the lessons compare, from the table of all GPUs in `kimivl_lab.gpus`.

Test: tests/test_lessons.py. Data: data/published/devices.csv.
"""

from ..gpus import Gpu, gpus

_SHOWN = ("L4", "A100 SXM 80 GB", "H100 SXM", "H200 SXM")


def devices() -> list[Gpu]:
    """The GPUs of the lessons, slowest first."""
    return [gpu for gpu in gpus() if gpu.name in _SHOWN]
