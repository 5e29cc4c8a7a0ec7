"""The figures: what is drawn is what was given, and lightness alone keeps the colours apart."""

from itertools import combinations

import numpy as np
import pytest
from matplotlib.colors import to_rgb, to_rgba
from matplotlib.container import BarContainer
from matplotlib.patches import Rectangle

from kimivl_lab import KimiVLConfig, plots
from kimivl_lab.measure.timing import Timing
from tests.drawing import drawing, picture, words  # noqa: F401

pytestmark = pytest.mark.usefixtures("drawing")


def lightness(color):
    """CIE L* of a colour: what greyscale keeps of it."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    luminance = float(np.dot((0.2126, 0.7152, 0.0722), linear))
    return 116 * luminance ** (1 / 3) - 16


def test_colours_stay_apart_in_greyscale():
    steps = [lightness(color) for color in plots.COLORS.values()]
    assert min(abs(a - b) for a, b in combinations(steps, 2)) > 8, [round(step) for step in steps]


def test_patch_grid_says_what_the_geometry_counts():
    fig, (whole, corner) = plots.patch_grid(picture(600, 400))
    text = words(fig)
    assert "600 x 400 px become 1,320 patches, 330 tokens" in text and "30 x 44 patches" in text
    assert whole.get_xlim() == (0, 616) and whole.get_ylim() == (420, 0)
    assert corner.get_xlim() == (616 - 84, 616)
    numbers = {t.get_text() for t in corner.texts}
    assert len(numbers) == 36 and {"1319", "1094"} <= numbers


def test_patch_grid_of_a_picture_smaller_than_the_corner():
    fig, (_, corner) = plots.patch_grid(picture(6, 3))
    words(fig)
    assert {t.get_text() for t in corner.texts} == {"0", "1", "2", "3"}


def test_gallery_keeps_rows_and_captions():
    rows = [{"wide": picture(900, 100)}, {"tall": picture(60, 1024), "tiny": picture(6, 3)}]
    fig, axes = plots.patch_gallery(rows)
    assert list(axes) == ["wide", "tall", "tiny"]
    assert axes["tiny"].get_title(loc="left") == "tiny, 6 x 3 px\n2 x 2 patches\n1 token\n98 % padding"
    words(fig)
    assert axes["wide"].get_position().y0 > axes["tall"].get_position().y1


def test_encoder_diagram_draws_tensors_to_scale():
    config = KimiVLConfig.preset("kimi-vl-a3b")
    fig, ax = plots.encoder_diagram({"a": picture(640, 427), "b": picture(451, 300)}, config)
    text = words(fig)
    assert "2,220 patches in, 555 tokens out" in text and "555 x 4,608" in text and "27 blocks" in text
    navy = [
        bar for bar in ax.patches if isinstance(bar, Rectangle) and bar.get_facecolor() == to_rgba(plots.COLORS["navy"])
    ]
    features = [bar.get_width() / navy[0].get_width() * 588 for bar in navy if bar.get_width() != bar.get_height()]
    assert features == pytest.approx([588, 1152, 1152, 4608, 2048])


def test_flops_by_size_fills_the_whole():
    shares = {"linear": [0.75, 0.5], "attention": [0.25, 0.5]}
    fig, ax = plots.flops_by_size([16, 1024], shares, {"limit": 512}, "a title")
    tops = [np.asarray(area.get_paths()[0].vertices)[:, 1].max() for area in ax.collections]
    assert tops == [0.75, 1.0]
    assert "limit" in words(fig) and "attention" in words(fig)


def test_stage_profile_draws_shares_and_ratios():
    flops = {"attention": 0.25, "MLP": 0.75, "rope": 0.0}
    times = {"attention": Timing(2, 3, 4, 9), "MLP": Timing(4, 5, 6, 9), "rope": Timing(1, 2, 3, 9)}
    roofline = {"attention": 1.0, "MLP": 5.0, "rope": 0.1}
    fig, (left, right) = plots.stage_profile(flops, times, roofline, title="t", subtitle=plots.measured_on("cpu"))
    predicted, measured = (c for c in left.containers if isinstance(c, BarContainer))
    assert [bar.get_width() for bar in predicted] == [0.25, 0.75, 0.0]
    assert [bar.get_width() for bar in measured] == pytest.approx([0.3, 0.5, 0.2])
    assert np.asarray(right.lines[0].get_xdata()) == pytest.approx([3, 1, 20])
    assert all(word in words(fig) for word in ("3.0x", "1.0x", "20.0x", "cores"))


def test_token_distribution_sorts_by_median_and_counts_what_is_over():
    fig, ax = plots.token_distribution({"large": [1100, 1050, 900], "small": [1, 16, 20]}, 1024, "a title")
    text = words(fig)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["small", "large"]
    assert "median 1,050, 67% over" in text and "median 16, 0% over" in text


def test_limit_map_shades_and_marks_what_passes_the_limit():
    sides = [16, 1000, 8000]
    patches = np.array([[4, 144, 0], [144, 4356, 4380], [0, 4380, 4096]])
    fig, (area, shape) = plots.limit_map(sides, patches, 4096, 5400, [(1000, 1000, 4356)], "a title")
    drawn = np.ma.getmaskarray(np.ma.asarray(area.collections[0].get_array()))
    assert drawn.tolist() == (patches == 0).tolist()
    assert sorted(patches for _, patches in points(shape)) == [4356, 4380, 4380]
    assert "1000 x 1000: 4,356" in words(fig)
    warm = [red > blue for red, _, blue, _ in (drawn_color(area, value) for value in (4096, 4097))]
    assert warm == [False, True], "the limit itself is not above the limit"


def test_padding_cost_stacks_both_kinds():
    fig, (left, right) = plots.padding_cost({"a": 0.02}, {"a": 0.03}, [(4, 0.5), (9, 0.25)], [(1, 1.0), (4, 0.7)], "t")
    blank, partly = (bars.patches[0] for bars in left.containers if isinstance(bars, BarContainer))
    assert (blank.get_width(), partly.get_x(), partly.get_width()) == pytest.approx((0.02, 0.02, 0.03))
    assert points(right) == [[4, 0.5], [9, 0.25]]
    assert "5.0%" in words(fig)


def points(ax):
    """The scattered points of an axes."""
    return np.asarray(ax.collections[0].get_offsets()).tolist()


def drawn_color(ax, value):
    mesh = ax.collections[0]
    return mesh.cmap(mesh.norm(value))
