"""RoPE-2D in notebook 30: bytes of each way to turn q and k, and faulty factors that a test must refuse.

    steps("complex", itemsize=2)          # [("copy to float32", 2, 4), ...]: bytes read and written for one number
    bytes_moved("complex", 1656, 2)       # of all of q and k, angles included
    axes_verdicts(test)                   # what a learner's test says to right and to faulty factors

Test: tests/test_lessons_rope.py. Record: rope__*.csv.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..geometry import Grid, GridLike
from ..measure.accuracy import relative_error
from ..moonvit.rope import Rope2DPosEmb
from ..private_api import TorchDispatchMode, operator_schema

Factors = Callable[[GridLike], Tensor]  # (h, w) -> (h * w, d / 2) complex
_HALF = 2  # bytes of half a float32 number: an operator on one number of each pair, counted for one number


def steps(way: str, itemsize: int) -> list[tuple[str, int, int]]:
    """The operators of "complex", "real" or "in_place": words, bytes read and bytes written for one number of q and k.

    Args:
        itemsize: bytes of one number of q and k, 2 or 4; the arithmetic is float32.
    """
    if way == "in_place":
        return [("blocks that stay in the cache", itemsize, itemsize)]
    cast = [("copy to float32", itemsize, 4)] if itemsize != 4 else []
    back = [("copy back", 4, itemsize)] if itemsize != 4 else []
    if way == "complex":  # torch multiplies complex numbers of one piece, which a slice of the packed q, k, v is not
        contiguous = [] if cast else [("copy into one piece", 4, 4)]
        return [*cast, *contiguous, ("complex product", 4, 4), *back]
    if way == "real":
        products = [("product of one number of each pair", _HALF, _HALF)] * 4
        sums = [("difference or sum of two products", 2 * _HALF, _HALF)] * 2
        return [*cast, *products, *sums, ("stack", 4, 4), *back]
    raise ValueError(f"no steps are known of {way!r}: one of 'complex', 'real', 'in_place'")


def bytes_a_number(way: str, itemsize: int = 2) -> int:
    """Bytes read and written for one number of q and k: 20 for "complex" in bfloat16."""
    return sum(read + written for _, read, written in steps(way, itemsize))


def bytes_moved(way: str, patches: int, itemsize: int = 2, heads: int = 16, head_size: int = 72) -> int:
    """Bytes of one call on q and k of `patches`, with their (cos, sin) read once."""
    return patches * (2 * heads * head_size * bytes_a_number(way, itemsize) + 4 * head_size)


class _NewBytes(TorchDispatchMode):
    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not (func.is_view or operator_schema(func).is_mutable):
            self.total += result.nbytes
        return result


def new_bytes(run: Callable[[], object]) -> int:
    """Bytes of all tensors that `run` makes; views and results written in place are none."""
    with _NewBytes() as counter:
        run()
    return counter.total


def angles(row: int, column: int, head_size: int) -> list[float]:
    """The d / 2 angles of one patch, slot by slot: the column's and the row's for each theta_i."""
    thetas = [10000 ** (-4 * i / head_size) for i in range(head_size // 4)]
    return [position * theta for theta in thetas for position in (column, row)]


def swap_axes(factors: Tensor) -> Tensor:
    """(..., d/2) factors with the slots of columns and of rows exchanged: slot 2i for slot 2i + 1."""
    return factors.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def right_factors(grid: GridLike, head_size: int = 72) -> Tensor:
    """(h * w, d/2) complex, the library's."""
    return Rope2DPosEmb(head_size).get_freqs_cis_by_seqlens_list([Grid(*grid)])


def faulty_factors() -> dict[str, Factors]:
    """Words -> factors with one fault each."""

    def shifted(grid: GridLike) -> Tensor:
        factors = right_factors(grid)
        return torch.cat((factors[:, 2:], factors[:, -2:]), dim=1)

    def rows_from_columns(grid: GridLike) -> Tensor:
        factors = right_factors(grid).clone()
        factors[:, 1::2] = factors[:, 0::2]
        return factors

    return {
        "rows and columns exchanged": lambda grid: swap_axes(right_factors(grid)),
        "patches numbered column by column": lambda grid: right_factors(grid).unflatten(0, tuple(grid))
        .transpose(0, 1).flatten(0, 1),
        "row slots turned by the column": rows_from_columns,
        "theta of the next i": shifted,
    }  # fmt: skip


def axes_verdicts(test: Callable[[Factors], object]) -> list[bool] | None:
    """What `test` says to the right factors, then to each of `faulty_factors`; None if it says None or ... at once."""
    first = test(right_factors)
    if first is None or first is ...:
        return None
    return [bool(first), *(bool(test(factors)) for factors in faulty_factors().values())]


def in_place_verdicts(rotate: Callable[[Tensor, Tensor, Tensor], Any]) -> tuple[bool, bool, bool] | None:
    """Whether `rotate(pairs, cos, sin)` gives right values, writes into `pairs`, and makes no more bytes than `pairs`.

    `pairs` is (L, d/2, 2) float32; cos and sin are (L, d/2). None if the function returns None or ... .
    """
    pairs = torch.randn(24, 36, 2, generator=torch.Generator().manual_seed(4))
    factors = right_factors((4, 6))
    want = torch.view_as_real(torch.view_as_complex(pairs) * factors)
    if (answer := rotate(pairs.clone(), factors.real, factors.imag)) is None or answer is ...:
        return None
    given, results = pairs.clone(), []
    made = new_bytes(lambda: results.append(rotate(given, factors.real, factors.imag)))
    same_memory = isinstance(results[0], Tensor) and results[0].data_ptr() == given.data_ptr()
    return relative_error(given, want) < 1e-6, same_memory, made <= given.nbytes
