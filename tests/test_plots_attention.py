"""The figures of packed attention: what is drawn is what was given."""

import numpy as np
import pytest
from matplotlib.patches import Rectangle

from kimivl_lab.measure.timing import Timing
from kimivl_lab.plots import attention
from tests.drawing import drawing, picture, words  # noqa: F401

pytestmark = pytest.mark.usefixtures("drawing")


def rectangles(ax, hatched):
    """(x, y, width, height) of the filled rectangles of a plot, with or without hatching."""
    found = [patch for patch in ax.patches if isinstance(patch, Rectangle) and patch.get_fill()]
    return [(*one.get_xy(), one.get_width(), one.get_height()) for one in found if bool(one.get_hatch()) == hatched]


def points(line):
    """(x, y) of a line's points."""
    pairs = np.asarray(line.get_xydata()).round(6)
    return [(x, y) for x, y in pairs.tolist()]


def test_the_mask_is_block_diagonal_and_to_scale():
    pictures = {"a": picture(56, 112), "b": picture(84, 28), "c": picture(28, 28)}  # 32, 12, 4 patches
    bound = ("bound", [1, 2], [0, 0.5])
    fig, (mask, _) = attention.packed_mask(pictures, [1, 2], {"w": [0, 0.4]}, bound=bound, title="t")
    assert rectangles(mask, hatched=False) == [(0, 0, 32, 32), (32, 32, 12, 12), (44, 44, 4, 4)]
    assert rectangles(mask, hatched=True) == [(0, 0, 48, 48)]
    assert mask.get_xlim() == (0, 48) and mask.get_ylim() == (48, 0)
    assert list(mask.get_xticks()) == [0, 32, 44, 48]
    text = words(fig)
    assert all(name in text for name in ("a, 32", "b, 12", "c, 4"))


def test_the_waste_is_drawn_as_given_below_its_bound():
    bound = ("bound", [1, 2, 4], [0, 0.5, 0.75])
    _, (_, ax) = attention.packed_mask({"a": picture(56, 56)}, [1, 4], {"w": [0, 0.6]}, bound=bound, title="t")
    drawn = {line.get_label(): points(line) for line in ax.lines}
    assert drawn == {"bound": [(1, 0), (2, 0.5), (4, 0.75)], "w": [(1, 0), (4, 0.6)]}


@pytest.mark.parametrize("computed", [0, 5, 8, 31, 32])
def test_the_hatched_area_is_the_share_that_is_missing(computed):
    one = picture(112, 56)  # 4 x 8 patches
    fig, ax = attention.missing_rows([{"batch": {"a": (one, computed)}}], title="t")
    area = sum(width * height for *_, width, height in rectangles(ax, hatched=True))
    assert area == pytest.approx(2 * (32 - computed) / 32)  # the picture is drawn 2 wide and 1 high
    assert ("all 32 there" if computed == 32 else f"{32 - computed} of 32 missing") in words(fig)


def test_pictures_of_a_line_do_not_overlap():
    batch = {"a": (picture(112, 56), 4), "b": (picture(56, 56), 4)}
    _, ax = attention.missing_rows([{"first": batch, "second": batch}, {"third": batch}], title="t")
    extents = [image.get_extent() for image in ax.images]
    assert len(extents) == 6
    assert all(a[1] < b[0] for a, b in zip(extents[:3], extents[1:4], strict=True))
    assert min(extents[4][2:]) > max(extents[0][2:])


def test_memory_axis_names_powers_of_1024():
    curves = {"mask": [1 / 2**20, 1.0, 2.0**20]}
    fig, ax = attention.memory_growth([1, 4, 8], curves, [(4, 1.5)], (4, 1.0, "here"), title="t", subtitle="s")
    text = words(fig)
    assert all(unit in text for unit in ("1 B", "1 KiB", "1 MiB", "1 GiB", "1 TiB", "here"))
    measured = next(line for line in ax.lines if line.get_label() == "measured here, float32")
    assert points(measured) == [(4, 1.5)]


def test_memory_is_drawn_where_nothing_could_be_measured():
    fig, ax = attention.memory_growth([1, 2], {"m": [1, 4]}, [], (2, 4, "here"), title="t", subtitle="s")
    words(fig)
    assert ax.get_legend() is None


def test_roofline_places_every_operator_and_its_ratio():
    operators = {
        "pass": attention.Operator(10**6, 10**7, Timing(1.9, 2.0, 2.2, 5)),  # 0.1 FLOP a byte, roof 1 ms at 10 GB/s
        "product": attention.Operator(10**9, 10**7, Timing(15, 15, 16, 5)),  # 100 FLOP a byte, roof 10 ms at 100
        "wide": attention.Operator(10**9, 10**6, Timing(20, 20, 20, 5)),
    }
    fig, (left, right) = attention.roofline(operators, 100.0, 10.0, title="t", subtitle="s")
    text = words(fig)
    assert all(name in text for name in (*operators, "2.0x", "1.5x", "ridge 10", "100 GFLOP/s", "10.0 GB/s"))
    drawn = {point for line in left.lines if line.get_marker() in ("o", "s") for point in points(line)}
    assert drawn == {(0.1, 0.5), (100.0, 66.666667), (1000.0, 50.0)}
    predicted = next(line for line in right.lines if line.get_label() == "roofline")
    assert np.allclose(predicted.get_xdata(), [1, 10, 10])
