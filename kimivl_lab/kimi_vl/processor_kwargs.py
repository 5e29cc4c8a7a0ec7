"""Which keyword arguments a function accepts. The others are set aside with a warning, or refused.

A server passes one set of options to many processors. Three faults follow when the accepted names are remembered for
each class: an override on one instance counts for all instances; `functools.wraps` shows the names of the wrapped
function while the wrapper takes others; options that matter are dropped without a word after a first warning. For
that reason nothing is remembered here. Reading the names from a function's code object takes about as long as a cache
lookup. The callable's own parameters count, and each drop is returned and causes a warning.

Test: tests/test_processor_kwargs.py.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from ..checks import with_suggestions


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
        warnings.warn(f"{owner} does not accept, so dropped: {with_suggestions(dropped, accepted)}", stacklevel=2)
    return kept, dropped


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
