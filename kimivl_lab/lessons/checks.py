"""Checks of a learner's answers: right ones are told why, wrong ones are refused with a hint, blanks pass.

    check("patches in the batch", answer, 3540, hint="multiply h and w of each grid, then add")
    check("milliseconds", answer, 12.6, rtol=0.05, near={25.2: "you counted read and written bytes twice"})
    check_function("tokens", tokens, {(4, 6): 6, (2, 2): 1}, hint="a token is 2 x 2 patches")

An answer that is None or ... prints "not answered yet" and passes, so that an unanswered notebook runs to its end.
A wrong answer raises `WrongAnswer`, which a notebook shows without a traceback and without the right answer.
Test: tests/test_lessons.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

NOT_ANSWERED = "not answered yet"


class WrongAnswer(AssertionError):
    """An answer that a check refuses; the message says what is wrong and gives the hint."""

    def _render_traceback_(self) -> list[str]:
        """IPython shows this in place of a traceback."""
        return [f"WrongAnswer: {self}"]


def check(
    name: str,
    answer: Any,
    expected: Any,
    *,
    rtol: float = 0.0,
    hint: str = "",
    near: Mapping[Any, str] | None = None,
) -> None:
    """Compares an answer with the expected one and prints whether it is right or not given yet.

    Args:
        name: what is asked for, with its unit: "milliseconds a forward".
        answer: a number, word, bool, sequence or tensor; None or ... if not answered.
        expected: the right one. Numbers compare as numbers (1652.0 is 1652), tensors by shape and values, sequences
            by length and members.
        rtol: the tolerance of numbers and tensors, relative to the expected one; 0 asks for the exact value.
        hint: what to think of, shown with a refusal.
        near: near misses -> what went wrong there; compared like the answer.

    Raises:
        WrongAnswer: the answer is another one, or of another kind.
    """
    if answer is None or answer is ...:
        print(f"{name}: {NOT_ANSWERED}")
        return
    if _equal(answer, expected, rtol):
        print(f"{name}: right, {_shown(expected)} ({_tolerance(rtol)})")
        return
    for miss, reason in (near or {}).items():
        if _equal(answer, miss, rtol):
            raise WrongAnswer(f"{name}: {_shown(answer)} is a near miss: {reason}")
    difference = _difference(answer, expected)
    raise WrongAnswer(_refusal(name, f"{_shown(answer)} is not right{difference} ({_tolerance(rtol)})", hint))


def check_function(
    name: str,
    function: Callable[..., Any],
    cases: Mapping[tuple[Any, ...], Any] | Sequence[tuple[tuple[Any, ...], Any]],
    *,
    rtol: float = 0.0,
    hint: str = "",
) -> None:
    """Calls `function` with each case's arguments and compares. A function that returns None or ... is not answered.

    Args:
        cases: arguments -> expected result, or pairs of them where arguments cannot be keys. They must tell the usual
            wrong answers from the right one: non-square, several images, an empty one.
    """
    pairs = list(cases.items()) if isinstance(cases, Mapping) else list(cases)
    for arguments, expected in pairs:
        answer = function(*arguments)
        if answer is None or answer is ...:
            print(f"{name}: {NOT_ANSWERED}")
            return
        if not _equal(answer, expected, rtol):
            given = ", ".join(_shown(argument) for argument in arguments)
            wrong = f"for ({given}) it gives {_shown(answer)}, which is not right{_difference(answer, expected)}"
            raise WrongAnswer(_refusal(name, f"{wrong} ({_tolerance(rtol)})", hint))
    print(f"{name}: right for all {len(pairs)} cases ({_tolerance(rtol)})")


def _equal(answer: Any, expected: Any, rtol: float) -> bool:
    if isinstance(expected, np.ndarray | Tensor):
        if not isinstance(answer, np.ndarray | Tensor) or tuple(answer.shape) != tuple(expected.shape):
            return False
        got, want = (torch.as_tensor(one, device="cpu").detach() for one in (answer, expected))
        same_kind = got.is_floating_point() == want.is_floating_point()
        allowed = rtol * float(want.double().abs().max()) if want.numel() else 0.0
        return same_kind and bool(((got.double() - want.double()).abs() <= allowed).all())
    if isinstance(expected, bool | str) or isinstance(answer, bool | str):
        return type(answer) is type(expected) and answer == expected
    if isinstance(expected, Sequence):
        return (
            isinstance(answer, Sequence)
            and len(answer) == len(expected)
            and all(_equal(one, other, rtol) for one, other in zip(answer, expected, strict=True))
        )
    try:
        value = float(answer)
    except (TypeError, ValueError):
        return False
    return math.isclose(value, float(expected), rel_tol=max(rtol, 1e-12), abs_tol=0.0)


def _difference(answer: Any, expected: Any) -> str:
    """What differs in kind, in words: the shape of a tensor, the length of a sequence; "" if nothing does."""
    if isinstance(expected, Tensor | np.ndarray):
        if not isinstance(answer, Tensor | np.ndarray):
            return f": a tensor is asked for, not {type(answer).__name__}"
        if tuple(answer.shape) != tuple(expected.shape):
            return f": its shape is {tuple(answer.shape)}, asked for is {tuple(expected.shape)}"
        return ": its shape is right, its values are not"
    both = isinstance(expected, Sequence) and not isinstance(expected, str) and isinstance(answer, Sequence)
    if both and len(answer) != len(expected):
        return f": it has {len(answer)} members, asked for are {len(expected)}"
    return ""


def _refusal(name: str, reason: str, hint: str) -> str:
    return f"{name}: {reason}. Hint: {hint}" if hint else f"{name}: {reason}"


def _tolerance(rtol: float) -> str:
    return "exact" if rtol == 0 else f"tolerance {100 * rtol:.3g} %"


def _shown(value: Any) -> str:
    if isinstance(value, Tensor | np.ndarray):
        return f"a tensor of shape {tuple(value.shape)}" if np.prod(value.shape) > 8 else str(value.tolist())
    if isinstance(value, list) and any(isinstance(one, Tensor | np.ndarray) for one in value):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return repr(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"
