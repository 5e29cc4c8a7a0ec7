"""Checks of arguments that several modules share: positive integers, offsets, and names of keyword arguments.

Test: tests/test_checks.py.
"""

import difflib
import operator
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from numbers import Integral
from typing import Any


def as_positive(name: str, value: Any, most: int | None = None) -> int:
    """`value` as a plain int of 1 or more, and at most `most`. ValueError with `name` and `value` for anything else.

    Python's and numpy's integers are accepted, and arrays and tensors that hold one integer; a bool is not.
    """
    try:
        whole = operator.index(value)
    except TypeError:
        whole = 0
    if whole < 1 or isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
        raise ValueError(f"{name} must be a positive integer, got {value!r:.200}")
    if most is not None and whole > most:
        raise ValueError(f"{name} must be at most {most}, got {whole}")
    return whole


def as_not_negative(name: str, value: Any) -> int:
    """`value` as a plain int of 0 or more. ValueError as in `as_positive`."""
    zero = isinstance(value, Integral) and not isinstance(value, bool) and value == 0
    return 0 if zero else as_positive(f"{name}, if not 0,", value)


def as_positive_pair(name: str, values: Any) -> tuple[int, int]:
    """`values`, a list, tuple or array of two, as plain ints of 1 or more. ValueError as in `as_positive`."""
    try:
        first, second = values
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be two positive integers (h, w), got {values!r:.200}") from None
    return as_positive(f"{name}[0]", first), as_positive(f"{name}[1]", second)


def segment_lengths(offsets: Sequence[int], rows: int, max_seqlen: int) -> list[int]:
    """Lengths of the segments between `offsets`: [0, 2, 6, 9] gives [2, 4, 3].

    ValueError unless the offsets rise (or repeat) from 0 to at most `rows`, with no segment above `max_seqlen`.
    """
    lengths = [end - start for start, end in pairwise(offsets)]
    if not offsets or offsets[0] != 0 or offsets[-1] > rows or min(lengths, default=0) < 0:
        raise ValueError(f"offsets must rise from 0 to at most {rows} patches, got {offsets!r:.200}")
    if max(lengths, default=0) > max_seqlen:
        raise ValueError(f"max_seqlen {max_seqlen} is below the longest image, {max(lengths)} patches")
    return lengths


def require_known_kwargs(names: Iterable[str], accepted: Collection[str], owner: str) -> None:
    """TypeError naming each unknown keyword with its closest accepted spelling, and everything `owner` accepts."""
    unknown = [name for name in names if name not in accepted]
    if unknown:
        raise TypeError(
            f"{owner} got unknown keyword {with_suggestions(unknown, accepted)}; "
            f"it accepts {', '.join(sorted(accepted))}"
        )


def with_suggestions(names: Iterable[str], accepted: Collection[str]) -> str:
    """The names in quotes, each with its closest accepted spelling: "'sizee' (did you mean 'size'?)"."""
    described = []
    for name in names:
        close = difflib.get_close_matches(name, accepted, n=1)
        described.append(f"{name!r} (did you mean {close[0]!r}?)" if close else repr(name))
    return ", ".join(described)
