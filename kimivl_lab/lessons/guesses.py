"""A learner's guess, noted before the measurement, and shown beside the prediction and the measurement.

    time_guess = guess("time for three photographs", None, unit="ms")    # the learner writes a number for None
    compare(Comparison(time_guess, predicted=41.0, measured=57.3))       # prints one line of a table

Use a guess in front of every measurement that has a surprising result. A guess that is None passes and says so, so that
an unanswered notebook runs to its end with the same output each time. `plots.guesses` draws comparisons.
Example: a guess of 40, a prediction of 41 and a measurement of 57.3 print the ratio 1.43 (measured over guess).
Test: tests/test_lessons.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

NO_GUESS = "no guess yet"


@dataclass(frozen=True)
class Guess:
    """What is guessed, the guess (None: not answered) and its unit."""

    quantity: str
    value: float | str | None
    unit: str = ""


@dataclass(frozen=True)
class Comparison:
    """One guess with what the formula predicts and what was counted or measured; None where there is no such number."""

    guess: Guess
    predicted: float | None = None
    measured: float | None = None


def guess(quantity: str, value: float | str | None, *, unit: str = "", choices: Sequence[str] = ()) -> Guess:
    """Notes a guess and prints it.

    Args:
        quantity: what is guessed, in words: "time for three photographs".
        value: the guess; None or ... if there is none yet.
        unit: printed behind numbers.
        choices: if given, the guess is one of these words and not a number.

    Raises:
        ValueError: the guess is no finite number above 0, or none of the choices.
    """
    if value is None or value is ...:
        wanted = f"one of {', '.join(map(repr, choices))}" if choices else "a number"
        print(f"{quantity}: {NO_GUESS} (write {wanted} in place of None and run the cell again)")
        return Guess(quantity, None, unit)
    if choices:
        if value not in choices:
            raise ValueError(f"{quantity}: a guess is one of {', '.join(map(repr, choices))}, not {value!r}")
        print(f"{quantity}: your guess is {value!r}")
        return Guess(quantity, value, unit)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"{quantity}: a guess is a number above 0{f' in {unit}' if unit else ''}, not {value!r}")
    print(f"{quantity}: your guess is {_number(value)} {unit}".rstrip())
    return Guess(quantity, value, unit)


def compare(*comparisons: Comparison) -> None:
    """Prints guess, prediction and measurement side by side, one line for each comparison.

    The last column is measured over guessed, or predicted over guessed where nothing was measured.
    """
    width = max(len(_label(one.guess)) for one in comparisons)
    print(f"{'':{width}s} {'your guess':>12s} {'predicted':>12s} {'measured':>12s} {'ratio':>7s}")
    for one in comparisons:
        known = one.measured if one.measured is not None else one.predicted
        numbers = isinstance(one.guess.value, int | float) and known is not None
        ratio = f"{known / one.guess.value:.2f}" if numbers else "-"
        cells = [_number(value) for value in (one.guess.value, one.predicted, one.measured)]
        print(f"{_label(one.guess):{width}s} {cells[0]:>12s} {cells[1]:>12s} {cells[2]:>12s} {ratio:>7s}")


def _label(one: Guess) -> str:
    return f"{one.quantity}, {one.unit}" if one.unit else one.quantity


def _number(value: float | str | None) -> str:
    """Four digits, or as many as stand before the point: 1,204 and 0.01234."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"
