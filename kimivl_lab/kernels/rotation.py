"""Rotates q and k by the factors (cos, sin) of `kimivl_lab.moonvit.rope`: RoPE-2D applied.

Five implementations rotate q and k together, (L, 2, heads, d):

    "complex"   the reference: cast, one complex product, cast back
    "real"      the same product in real numbers, one expression that a compiler can fuse
    "compiled"  "real" as one kernel by torch.compile; "complex" where it cannot be compiled
    "in_place"  the complex product on blocks of patches that fit in a core's cache, written back into q and k. It gives
                the bits of "complex" without float32 copies of all of q and k.
    "amx"       the same in one pass by this library's kernel, bfloat16, with one rounding less

The last two write into q and k. Where a gradient of q and k is wanted, they run "complex" instead.

Test: tests/test_rope.py, tests/test_amx.py. Record: rope__*.csv.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .amx.rope import rotate as amx_rotate
from .amx.rope import rotate_
from .dispatch import CompiledFunction, must_dispatch, wants_gradient
from .library import unavailable

_BLOCK_ROWS = 128  # patches: 1.2 MB of q and k in float32 at 16 heads of 72, which second-level caches hold


def rotate_complex(qk: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotates qk (L, 2, heads, d) by cos_sin (L, d/2, 2) into a new tensor of the same dtype: the reference."""
    factors = torch.view_as_complex(cos_sin).unflatten(0, (-1, 1, 1))  # (L, 1, 1, d/2)
    pairs = torch.view_as_complex(qk.to(cos_sin.dtype).unflatten(-1, (-1, 2)).contiguous())  # (L, 2, heads, d/2)
    return torch.view_as_real(pairs * factors).flatten(-2).to(qk.dtype)


def rotate_real(qk: Tensor, cos_sin: Tensor) -> Tensor:
    """`rotate_complex` in real numbers: (re, im) -> (re cos - im sin, re sin + im cos)."""
    re, im = qk.to(cos_sin.dtype).unflatten(-1, (-1, 2)).unbind(-1)  # (L, 2, heads, d/2) each
    cos, sin = cos_sin.unflatten(0, (-1, 1, 1)).unbind(-1)  # (L, 1, 1, d/2) each
    return torch.stack((re * cos - im * sin, re * sin + im * cos), dim=-1).flatten(-2).to(qk.dtype)


rotate_compiled = CompiledFunction(rotate_real, "the rotation of q and k", fallback=rotate_complex)


def rotate_in_place(qk: Tensor, cos_sin: Tensor) -> Tensor:
    """Writes the values of `rotate_complex`, bit for bit, into `qk` and returns `qk`.

    Where a gradient is wanted, `qk` is left unchanged and the result is new.
    """
    if wants_gradient(qk):
        return rotate_complex(qk, cos_sin)
    length, slots, _ = cos_sin.shape
    factors = torch.view_as_complex(cos_sin).view(length, 1, 1, slots)
    if qk.dtype == cos_sin.dtype:
        torch.view_as_complex(qk.view(*qk.shape[:-1], slots, 2)).mul_(factors)
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
    """Writes into `qk`, bfloat16, and returns `qk`; where a gradient is wanted, the result of `rotate_complex`."""
    if wants_gradient(qk):
        return rotate_complex(qk, cos_sin)
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


def rotation_unavailable(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the implementation called `name` cannot run on `device` in `dtype`, or None when it can."""
    return unavailable("amx", device, dtype) if name == "amx" else None


def resolve_rotation(name: str, device: torch.device, dtype: torch.dtype) -> Rotation:
    """The implementation called `name`; "auto" is "compiled" on a GPU, "amx" on a CPU that has it, else "in_place".

    ValueError for a name that is unknown or cannot run on `device` in `dtype`.
    """
    if name == "auto" and device.type == "cuda":
        name = "compiled"
    elif name == "auto":
        name = "in_place" if rotation_unavailable("amx", device, dtype) else "amx"
    if name not in ROPE_IMPLEMENTATIONS:
        raise ValueError(f"unknown rope implementation {name!r}: 'auto' or one of {', '.join(ROPE_IMPLEMENTATIONS)}")
    if reason := rotation_unavailable(name, device, dtype):
        raise ValueError(f"rope={name!r}: {reason}")
    return ROPE_IMPLEMENTATIONS[name]
