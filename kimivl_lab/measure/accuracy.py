"""How far a result is from a reference, and the check that every benchmark makes before it times anything.

Test: tests/test_benchmarks.py.
"""

from collections.abc import Callable, Mapping

from torch import Tensor


def relative_error(got: Tensor, want: Tensor) -> float:
    """Frobenius norm of the difference over that of `want`, in float64; 0 when both are empty."""
    if got.shape != want.shape:
        raise ValueError(f"shapes differ: got {tuple(got.shape)}, want {tuple(want.shape)}")
    size = want.double().norm().item()
    distance = (got.double() - want.double()).norm().item()
    return distance / size if size else distance


def checked_errors(variants: Mapping[str, Callable[[], Tensor]], want: Tensor, tolerance: float) -> dict[str, float]:
    """`relative_error` of each variant; AssertionError naming the first above `tolerance` (or not a number)."""
    errors = {}
    for name, run in variants.items():
        errors[name] = relative_error(run(), want)
        if not errors[name] <= tolerance:
            raise AssertionError(f"{name} is off by {errors[name]:.2e}, allowed {tolerance:.0e}: not timed")
    return errors
