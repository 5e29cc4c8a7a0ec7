"""The linear layers of the published block at many row counts: torch's product and each packed one that runs here.

    python -m kimivl_lab.bench.linear [--quick] [--dtype float32] [--out DIR]

Every variant adds the bias and is compared with the product in float64 before it is timed. The record shows from how
many rows on a packed product is the faster one; the tower uses it at every size.

Test: tests/test_benchmarks.py. Record: linear__*.csv.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import MoonViTConfig
from ..kernels.packed_linear import PACKED_KERNELS, packed_unavailable
from . import harness
from .compare import COLUMNS, compare, mean_speedups

ROWS = (16, 64, 128, 256, 1024, 4096)
TOLERANCE = {"float32": 1e-5, "bfloat16": 8e-3}


@torch.no_grad()
def rows(options: argparse.Namespace) -> Iterator[harness.Row]:
    """The rows of one record."""
    dtype, generator = getattr(torch, options.dtype), torch.Generator().manual_seed(options.seed)
    config = MoonViTConfig.preset(options.preset)
    width, hidden = config.hidden_size, config.intermediate_size
    layers = {"wqkv": (width, 3 * width), "wo": (width, width), "fc0": (width, hidden), "fc1": (hidden, width)}
    for name, (inputs, outputs) in layers.items():
        weight, bias = (
            torch.randn(size, generator=generator, device="cpu").to(dtype) for size in ((outputs, inputs), (outputs,))
        )
        packed = {
            known: kernel.pack(weight)
            for known, kernel in PACKED_KERNELS.items()
            if packed_unavailable(known, weight.device, dtype) is None
        }
        for count in ROWS[::3] if options.quick else ROWS:
            x = torch.randn((count, inputs), generator=generator, device="cpu").to(dtype)
            runs: dict[str, Callable[[], Tensor]] = {"torch": partial(F.linear, x, weight, bias)}
            for known, copy in packed.items():
                runs[known] = partial(PACKED_KERNELS[known].multiply, x, copy, outputs, bias, None, False)
            yield from compare(
                options,
                f"{name}, {count} rows",
                runs,
                F.linear(x.double(), weight.double(), bias.double()),
                baseline="torch",
                tolerance=TOLERANCE[options.dtype],
                patches=count,
                bytes_moved=(weight.numel() + x.numel() + count * outputs) * dtype.itemsize,
                device="cpu",
            )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser(
        "linear", __doc__, dtypes=TOLERANCE, default=("float32",), preset="kimi-vl-a3b", rounds=(2, 15, 5)
    )
    harness.run_benchmark(parser, COLUMNS, rows, mean_speedups, arguments)


if __name__ == "__main__":
    main()
