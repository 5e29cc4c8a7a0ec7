"""Rounded sizes: what remains, how many lengths, and how many pixels are lost."""

import pytest

from kimivl_lab.datasets import load_sizes
from kimivl_lab.geometry import image_geometry
from kimivl_lab.planner.rounding import round_sizes


def test_sides_are_rounded_down_and_the_lost_pixels_are_counted():
    rounding = round_sizes([(640, 480), (448, 460, 3)], 224)
    assert rounding.sizes == {(448, 448): 4}
    assert rounding.lengths == (2, 1)
    assert rounding.pixels_lost == pytest.approx(1 - 4 * 448 * 448 / (640 * 480 + 3 * 448 * 460))


def test_a_large_image_is_first_shrunk_as_the_processor_does():
    shrunk = image_geometry(4000, 3000)
    (size,) = round_sizes([(4000, 3000)], 28).sizes
    assert size == (shrunk.resized_width // 28 * 28, shrunk.resized_height // 28 * 28)


def test_a_small_side_stays():
    rounding = round_sizes([(100, 500)], 224)
    assert rounding.sizes == {(100, 448): 1} and rounding.pixels_lost == pytest.approx(52 / 500)


def test_coarser_rounding_leaves_fewer_lengths_and_loses_more():
    coarse, fine = (round_sizes(load_sizes("pew_charts"), to) for to in (224, 56))
    assert coarse.lengths[1] < fine.lengths[1] < fine.lengths[0] == coarse.lengths[0]
    assert 0 < fine.pixels_lost < coarse.pixels_lost < 1
    assert sum(fine.sizes.values()) == 7724


@pytest.mark.parametrize(
    ("sizes", "to", "message"), [([(9, 9)], 30, "28.*30"), ([(9, 9)], 0, "0"), ([], 28, "no image")]
)
def test_bad_arguments_are_named(sizes, to, message):
    with pytest.raises(ValueError, match=message):
        round_sizes(sizes, to)
