"""Accepted keyword arguments: by function, never by class; every drop told."""

import functools
import gc
import weakref

import pytest

from kimivl_lab.kimi_vl.processor_kwargs import accepted_kwargs, filter_kwargs


class Processor:
    def preprocess(self, images, size=None, *, mean=0.5):
        return images, size, mean

    @classmethod
    def build(cls, path):
        return cls, path

    @staticmethod
    def load(path, strict=True):
        return path, strict

    def __call__(self, images, **kwargs):
        return images, kwargs


def wrapped(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **{name: value for name, value in kwargs.items() if name != "log"})

    return wrapper


class Logged:
    """A decorator written as a class."""

    def __init__(self, function):
        functools.update_wrapper(self, function)
        self.function = function

    def __call__(self, images, **kwargs):
        return self.function(images, **{name: value for name, value in kwargs.items() if name != "log"})


def narrowed(function):
    @functools.wraps(function)
    def wrapper(images, size=None):
        return function(images, size)

    return wrapper


def positional(a, b, /, c, *rest, d):
    return a, b, c, rest, d


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (Processor().preprocess, {"images", "size", "mean"}),
        (Processor.preprocess, {"self", "images", "size", "mean"}),
        (Processor.build, {"path"}),
        (Processor().load, {"path", "strict"}),
        (Processor, set()),
        (positional, {"c", "d"}),
        (lambda x, *, y: x, {"x", "y"}),
        (functools.partial(positional, 1, 2, d=3), {"c", "d"}),
        (functools.cache(positional), {"c", "d"}),
        (narrowed(Processor().preprocess), {"images", "size"}),
    ],
)
def test_named_parameters(function, names):
    assert accepted_kwargs(function) == names


@pytest.mark.parametrize(
    "function", [Processor(), Processor().__call__, Logged(Processor().preprocess), lambda **kwargs: kwargs, dict]
)
def test_any_keyword(function):
    assert accepted_kwargs(function) is None
    assert filter_kwargs(function, {"anything": 1}) == ({"anything": 1}, {})


def test_wraps_does_not_hide_what_the_wrapper_takes():
    function = wrapped(Processor().preprocess)
    assert accepted_kwargs(function) is None
    kept, _ = filter_kwargs(function, {"size": 2, "log": True})
    assert function("picture", **kept) == ("picture", 2, 0.5)


def test_an_override_on_one_instance_changes_no_other():
    plain, special = Processor(), Processor()
    vars(special)["preprocess"] = lambda images, crop: (images, crop)
    for _ in range(2):
        assert accepted_kwargs(special.preprocess) == {"images", "crop"}
        assert accepted_kwargs(plain.preprocess) == {"images", "size", "mean"}


def test_a_method_replaced_on_the_class_counts_at_once(monkeypatch):
    assert accepted_kwargs(Processor().preprocess) == {"images", "size", "mean"}
    monkeypatch.setattr(Processor, "preprocess", lambda self, images: images)
    assert accepted_kwargs(Processor().preprocess) == {"images"}


def test_nothing_is_kept_alive():
    def function(a):
        return a

    accepted_kwargs(function)
    reference = weakref.ref(function)
    del function
    gc.collect()
    assert reference() is None


def test_dropping_is_returned_and_warned_every_time():
    function = Processor().preprocess
    with pytest.warns(UserWarning, match=r"Processor.preprocess.*'sizes' \(did you mean 'size'\?\)"):
        assert filter_kwargs(function, {"sizes": 1, "mean": 2}) == ({"mean": 2}, {"sizes": 1})
    with pytest.warns(UserWarning, match="'crop'"):
        assert filter_kwargs(function, {"crop": 1}) == ({}, {"crop": 1})


def test_nothing_dropped_is_silent(recwarn):
    assert filter_kwargs(Processor().preprocess, {"size": 1}) == ({"size": 1}, {})
    assert not recwarn
