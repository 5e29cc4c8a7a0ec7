"""Which keyword arguments a callable accepts, so that others are set aside aloud, or refused.

Servers hand one bag of options to many processors. Three things go wrong when the accepted names are remembered by
class: an override on one instance is taken for every other's; `functools.wraps` shows the wrapped signature while the
wrapper takes more or less; options that matter vanish silently after a first warning. So nothing is remembered here (a
function's names are read from its code object in about the time of a cache lookup), the callable's own parameters
count, and every drop is returned and warned of.
"""

import difflib
import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any


def accepted_kwargs(function: Callable) -> frozenset[str] | None:
    """Names that `function` takes by keyword, or None when it takes any (`**kwargs`).

    A bound method's `self` is not among them. A wrapper counts by its own parameters, not by those of what it wraps.
    Where no parameters can be read (some built-ins) the answer is None.
    """
    bound = inspect.ismethod(function)
    underlying = function.__func__ if bound else function
    if not inspect.isfunction(underlying):
        return _from_signature(function)
    code = underlying.__code__
    if code.co_flags & inspect.CO_VARKEYWORDS:
        return None
    by_keyword = slice(code.co_posonlyargcount, code.co_argcount + code.co_kwonlyargcount)
    names = frozenset(code.co_varnames[by_keyword])
    return names - {code.co_varnames[0]} if bound and code.co_argcount else names


def filter_kwargs(function: Callable, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(kept, dropped): what `function` accepts of `kwargs`, and the rest, which a UserWarning names."""
    accepted = accepted_kwargs(function)
    if accepted is None:
        return dict(kwargs), {}
    kept = {name: value for name, value in kwargs.items() if name in accepted}
    dropped = {name: value for name, value in kwargs.items() if name not in accepted}
    if dropped:
        owner = getattr(function, "__qualname__", repr(function))
        warnings.warn(f"{owner} does not accept, so dropped: {_with_suggestions(dropped, accepted)}", stacklevel=2)
    return kept, dropped


def require_known_kwargs(names: Iterable[str], accepted: Collection[str], owner: str) -> None:
    """TypeError naming each unknown keyword with its closest accepted spelling, and everything `owner` accepts."""
    unknown = [name for name in names if name not in accepted]
    if unknown:
        raise TypeError(
            f"{owner} got unknown keyword {_with_suggestions(unknown, accepted)}; "
            f"it accepts {', '.join(sorted(accepted))}"
        )


def _with_suggestions(names: Iterable[str], accepted: Collection[str]) -> str:
    described = []
    for name in names:
        close = difflib.get_close_matches(name, accepted, n=1)
        described.append(f"{name!r} (did you mean {close[0]!r}?)" if close else repr(name))
    return ", ".join(described)


def _from_signature(function: Callable) -> frozenset[str] | None:
    """For classes, partials, callable instances and built-ins."""
    try:
        parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    except ValueError:  # a wrapper written in C, such as functools.cache, passes all on to what it wraps
        wrapped = getattr(function, "__wrapped__", None)
        return accepted_kwargs(wrapped) if callable(wrapped) else None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(parameter.name for parameter in parameters if parameter.kind in by_keyword)
