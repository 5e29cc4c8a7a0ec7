"""In which dtype a CPU multiplies: its weights' own, or float32 where products in half precision do not pay.

A processor without bfloat16 instructions converts every operand of a bfloat16 product, and is then several times slower
than in float32. `half_pays` measures it, so that no list of processors is needed.

Test: tests/test_compute.py. Record: encoder__*__bfloat16__*.csv.
"""

import time
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F

from ..private_api import outside_modes
from .packed_linear import PACKED_KERNELS

HALF = (torch.bfloat16, torch.float16)
_ROWS, _WIDTH, _REPEATS = 256, 512, 5
_GAIN = 1.25  # what float32 must win to be worth twice the memory for packed weights


@cache
def half_pays(dtype: torch.dtype) -> bool:
    """Whether a CPU's product in `dtype`, bfloat16 or float16, is at most 1.25 times slower than the packed product in
    float32, which must run here.

    Both are timed, in turns and each by its fastest run: some milliseconds, once in a process.
    """
    with torch.no_grad(), outside_modes():
        half, x = (torch.ones((_ROWS, _WIDTH), dtype=kind, device="cpu") for kind in (dtype, torch.float32))
        weight = torch.ones((_WIDTH, _WIDTH), dtype=dtype, device="cpu")
        kernel = PACKED_KERNELS["prepacked"]
        packed = kernel.pack(weight.float())
        runs = lambda: F.linear(half, weight), lambda: kernel.multiply(x, packed, _WIDTH, None, None, False)
        times = [[_seconds(run) for run in runs] for _ in range(1 + _REPEATS)][1:]
    return min(own for own, _ in times) < _GAIN * min(single for _, single in times)


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
