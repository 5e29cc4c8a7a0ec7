"""RoPE-2D by `rope.c`: rotates q and k in place, in one pass over them.

`rotate_` is the same as the operator `kimivl_lab::rotate_` of torch.library: a trace holds it as one node. No gradient
passes through it, and autograd does not say so: `rotate_amx` of `kimivl_lab.kernels.rotation` runs the reference where
a gradient is wanted.

Test: tests/test_amx.py. Record: rope__*__bfloat16__*.csv.
"""

import torch
from torch import Tensor

from ..library import library, require_host

_LARGEST_HEAD = 512


def rotate(qk: Tensor, cos_sin: Tensor) -> None:
    """Rotates qk (L, 2, heads, d) bfloat16 by cos_sin (L, d/2, 2) float32, in place.

    `qk` may be a view of wider rows, such as (L, 3, heads, d), if q and k of one patch are adjacent.

    Raises:
        ValueError: operands of other shapes, dtypes or layouts, or that want a gradient.
        BuildError: there are no kernels on this machine.
    """
    kernels = library("amx")
    rows, two, heads, d = qk.shape
    require_host("qk", qk, qk.shape)
    if d % 2 or d > _LARGEST_HEAD or qk.stride()[1:] != (heads * d, d, 1):
        raise ValueError(
            f"heads must be even, of at most {_LARGEST_HEAD} channels, and one after another, got {d} channels and "
            f"strides {qk.stride()}"
        )
    require_host("cos_sin", cos_sin, (rows, d // 2, 2), torch.float32)
    factors, threads = cos_sin.contiguous(), torch.get_num_threads()
    kernels.rotate(qk.data_ptr(), qk.stride(0), factors.data_ptr(), rows, two * heads, d, threads)


rotate_ = torch.library.custom_op("kimivl_lab::rotate_", rotate, mutates_args=("qk",))


@rotate_.register_fake
def _(qk: Tensor, cos_sin: Tensor) -> None:
    return None
