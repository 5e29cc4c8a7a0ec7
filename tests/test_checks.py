"""Checks of arguments: what counts as a positive integer, and unknown keywords."""

import numpy as np
import pytest
import torch

from kimivl_lab.checks import as_not_negative, as_positive, as_positive_pair, require_known_kwargs


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), np.array(3), torch.tensor(3)])
def test_integers_of_every_library_become_plain_ones(value):
    assert as_positive("size", value) == 3
    assert type(as_positive("size", value)) is int


@pytest.mark.parametrize(
    "value",
    [0, -3, 3.0, np.float32(3), True, np.True_, np.array(True), torch.tensor(True), None, "3", np.array([3, 4]), b"3"],
)
def test_what_is_no_positive_integer_is_named(value):
    with pytest.raises(ValueError, match="^size must be a positive integer, got "):
        as_positive("size", value)


def test_a_largest_value_is_named():
    assert as_positive("size", 9, most=9) == 9
    with pytest.raises(ValueError, match="size must be at most 9, got 10"):
        as_positive("size", 10, most=9)


def test_zero_is_not_negative_and_the_rest_is_as_for_positive_integers():
    assert [as_not_negative("price", zero) for zero in (0, np.int64(0), 7)] == [0, 0, 7]
    for value in (-1, 0.0, False, None, "0"):
        with pytest.raises(ValueError, match="price"):
            as_not_negative("price", value)


@pytest.mark.parametrize("form", [list, tuple, np.array, torch.tensor])
def test_pairs_of_every_form(form):
    pair = as_positive_pair("kernel", form([2, 3]))
    assert pair == (2, 3) and [type(side) for side in pair] == [int, int]


@pytest.mark.parametrize(
    ("values", "words"),
    [((2,), "two"), (2, "two"), ((1, 2, 3), "two"), ((2, 0), r"1\].*0"), ((True, 2), r"0\].*True")],
)
def test_what_is_no_pair_is_named(values, words):
    with pytest.raises(ValueError, match=f"kernel.*{words}"):
        as_positive_pair("kernel", values)


def test_required_names_are_told_with_the_closest():
    require_known_kwargs({"size": 1}, {"size", "mean"}, "Processor")
    with pytest.raises(TypeError, match=r"Processor.*'sizee' \(did you mean 'size'\?\), 'zzz'; it accepts mean, size"):
        require_known_kwargs({"sizee": 1, "zzz": 2, "mean": 3}, {"size", "mean"}, "Processor")
