"""RoPE-2D applied: q and k turned by the factors (cos, sin) of `kimivl_lab.moonvit.rope`.

Five implementations turn q and k at once, (L, 2, heads, d):

    "complex"   the reference: cast, one complex product, cast back
    "real"      the same product in real numbers, one expression that a compiler can fuse
    "compiled"  "real" as one kernel by torch.compile; "complex" where it cannot be compiled
    "in_place"  the complex product on blocks of rows that stay in a core's cache, written back into q and k: bit-equal
                to "complex", without its float32 copies of the whole of q and k. Inference only.
    "amx"       the same in one pass by our own kernel, bfloat16, with one rounding less: see `kimivl_lab.kernels.amx`
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .amx.library import amx_unavailable
from .amx.rope import rotate as amx_rotate
from .amx.rope import rotate_
from .dispatch import CompiledFunction, must_dispatch

_BLOCK_ROWS = 128  # 128 rows of q and k at 16 heads of 72: 1.2 MB in float32, inside the second-level caches


def rotate_complex(qk: Tensor, cos_sin: Tensor) -> Tensor:
    """Turns qk (L, 2, heads, d) by cos_sin (L, d/2, 2); a new tensor of the same dtype. The reference."""
    factors = torch.view_as_complex(cos_sin).unflatten(0, (-1, 1, 1))  # (L, 1, 1, d/2)
    pairs = torch.view_as_complex(qk.to(cos_sin.dtype).unflatten(-1, (-1, 2)).contiguous())  # (L, 2, heads, d/2)
    return torch.view_as_real(pairs * factors).flatten(-2).to(qk.dtype)


def rotate_real(qk: Tensor, cos_sin: Tensor) -> Tensor:
    """The same in real numbers: (re, im) -> (re cos - im sin, re sin + im cos)."""
    re, im = qk.to(cos_sin.dtype).unflatten(-1, (-1, 2)).unbind(-1)  # (L, 2, heads, d/2) each
    cos, sin = cos_sin.unflatten(0, (-1, 1, 1)).unbind(-1)  # (L, 1, 1, d/2) each
    return torch.stack((re * cos - im * sin, re * sin + im * cos), dim=-1).flatten(-2).to(qk.dtype)


rotate_compiled = CompiledFunction(rotate_real, "the rotation of q and k", fallback=rotate_complex)


def rotate_in_place(qk: Tensor, cos_sin: Tensor) -> Tensor:
    """`rotate_complex` written into `qk`, which is returned; bit-equal values. `qk` must not require a gradient."""
    factors = torch.view_as_complex(cos_sin).unflatten(0, (-1, 1, 1))  # (L, 1, 1, d/2)
    if qk.dtype == cos_sin.dtype:
        torch.view_as_complex(qk.unflatten(-1, (-1, 2))).mul_(factors)
        return qk
    block_shape = (min(_BLOCK_ROWS, qk.shape[0]), *qk.shape[1:])
    block = torch.empty(block_shape, dtype=cos_sin.dtype, device=qk.device)
    pairs = torch.view_as_complex(block.unflatten(-1, (-1, 2)))
    for rows, row_factors in zip(qk.split(_BLOCK_ROWS), factors.split(_BLOCK_ROWS), strict=True):
        n = rows.shape[0]
        block[:n].copy_(rows)
        pairs[:n].mul_(row_factors)
        rows.copy_(block[:n])
    return qk


def rotate_amx(qk: Tensor, cos_sin: Tensor) -> Tensor:
    """Written into `qk`, which is returned. bfloat16; `qk` must not require a gradient."""
    (rotate_ if must_dispatch(qk) else amx_rotate)(qk, cos_sin)
    return qk


Rotation = Callable[[Tensor, Tensor], Tensor]
ROPE_IMPLEMENTATIONS: dict[str, Rotation] = {
    "complex": rotate_complex,
    "real": rotate_real,
    "compiled": rotate_compiled,
    "in_place": rotate_in_place,
    "amx": rotate_amx,
}


def resolve_rotation(name: str, device: torch.device, dtype: torch.dtype, *, inference: bool) -> Rotation:
    """The implementation called `name`; "auto" is "compiled" on a GPU, "amx" on a CPU that has it, else "in_place".

    Args:
        inference: no gradient is wanted. Otherwise what would be written in place is "complex".

    Raises:
        ValueError: a name that is unknown or cannot run on `device` in `dtype`.
    """
    if name == "auto" and device.type == "cuda":
        name = "compiled"
    elif name == "auto":
        name = "in_place" if not inference or amx_unavailable(device, dtype) else "amx"
    if name not in ROPE_IMPLEMENTATIONS:
        raise ValueError(f"unknown rope implementation {name!r}: 'auto' or one of {', '.join(ROPE_IMPLEMENTATIONS)}")
    if name == "amx" and (reason := amx_unavailable(device, dtype)):
        raise ValueError(f"rope='amx': {reason}")
    if not inference and name in ("in_place", "amx"):
        name = "complex"
    return ROPE_IMPLEMENTATIONS[name]
