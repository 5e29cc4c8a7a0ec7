"""Figures of the position embedding, the cache and the rope: what is drawn is what was given."""

import math

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from kimivl_lab.plots import cache, floor, position, rope
from tests.drawing import drawing, words  # noqa: F401

pytestmark = pytest.mark.usefixtures("drawing")


def xs(line: Line2D) -> list[float]:
    return np.asarray(line.get_xdata()).tolist()


def ys(line: Line2D) -> list[float]:
    return np.asarray(line.get_ydata()).tolist()


def lines(ax: Axes):
    """Legend's words -> (x, y) of a drawn line."""
    return {line.get_label(): (xs(line), ys(line)) for line in ax.lines}


def image(ax: Axes):
    (drawn,) = ax.images
    return np.asarray(drawn.get_array())


def timed(case, variant, ms, patches, floor_ms=1.0):
    times = {"latency_ms_p50": ms, "latency_ms_p20": 0.9 * ms, "latency_ms_p80": 1.2 * ms}
    return {"case": case, "variant": variant, "patches": patches, "floor_ms": floor_ms, **times}


ROWS = [
    timed("8 of receipts", "slow", 600.0, 34232, 10.0),
    timed("8 of receipts", "fast", 30.0, 34232, 10.0),
    timed("4x40", "slow", 8.0, 160),
    timed("4x40", "fast", 2.0, 160),
]


def test_similarity_maps_ring_the_chosen_positions_on_one_scale():
    small, large = np.linspace(-0.5, 1, 12).reshape(3, 4), np.linspace(0, 1, 30).reshape(5, 6)
    fig, axes = position.similarity_maps({"table": [((1, 2), small)], "resampled": [((4, 0), large)]}, "a title")
    assert axes.shape == (2, 1) and "resampled" in words(fig)
    for ax, values, (row, column) in zip(axes[:, 0], (small, large), ((1, 2), (4, 0)), strict=True):
        assert np.array_equal(image(ax), values)
        assert ax.images[0].get_clim() == (-0.5, 1)
        assert all((xs(line)[0], ys(line)[0]) == (column, row) for line in ax.lines)


def test_kernel_and_centres_draw_every_curve_and_position():
    distance = np.linspace(-2, 2, 9)
    kernels = {"one": 1 - abs(distance) / 2, "other": np.zeros(9)}
    fig, (left, right) = position.kernel_and_centres(
        distance, kernels, {"half": np.array([0.5, 2.5]), "ends": np.array([0, 3])}, 4, "t"
    )
    assert lines(left)["one"][1] == list(kernels["one"])
    assert [xs(line) for line in right.lines[1::2]] == [[0.5, 2.5], [0, 3]]
    assert "half" in words(fig) and len(right.patches) == 4


def test_fault_maps_share_a_scale_and_keep_what_is_below_its_floor_light():
    fig, axes = position.fault_maps({"a": np.array([[0.0, 0.02]]), "b": np.array([[0.1, 0.002]])}, "a title")
    assert [ax.images[0].get_clim() for ax in axes] == [(1e-3, 0.1)] * 2
    assert image(axes[0]).tolist() == [[1e-3, 0.02]]
    assert "relative error" in words(fig)


def test_error_by_side_leaves_exact_results_out():
    fig, ax = position.error_by_side([2, 4, 64], {"a": [1e-6, 2e-6, 0.0]}, "a title", "a note")
    drawn = lines(ax)["a"][1]
    assert drawn[:2] == [1e-6, 2e-6] and math.isnan(drawn[2])
    assert "a note" in words(fig)


def test_times_over_floor_sorts_by_patches_and_states_the_gain():
    names = {"slow": "torch", "fast": "ours"}
    fig, ax = floor.times_over_floor(ROWS, names, reference="slow", best="fast", title="t", subtitle="s")
    text = words(fig)
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        "4 x 40, 160 patches",
        "8 receipt scans, 34,232 patches",
    ]
    assert "4.0x" in text and "20.0x" in text and "predicted" not in text
    drawn = lines(ax)
    assert drawn["torch"] == ([8.0, 600.0], [1, 0]) and drawn["byte floor"][0] == [1.0, 10.0]


def test_times_over_floor_marks_predictions():
    names = {"slow": "torch", "fast": "ours"}
    predicted = {"slow": 5.0, "fast": 1.0}
    fig, ax = floor.times_over_floor(
        ROWS, names, reference="slow", best="fast", title="t", subtitle="s", predicted=predicted
    )
    hollow = [xs(line) for line in ax.lines if line.get_markerfacecolor() == "none"]
    assert [5.0, 50.0] in hollow and [1.0, 10.0] in hollow
    assert "predicted from its bytes" in words(fig)


def test_recorded_on_names_device_and_day():
    origin = {"device": "a machine", "date": "2026-11-29T19:25:51+00:00"}
    assert floor.recorded_on(origin, "float32") == "a machine  ·  2026-11-29  ·  float32"
    assert floor.recorded_on(origin) == "a machine  ·  2026-11-29"


def test_hit_rates_draw_one_panel_a_case_by_the_memory_held():
    bound = {"bound_entries": None, "bound_mib": None, "case": "a"}
    rows = [
        bound | {"variant": "lru by bytes", "bound_mib": 64.0, "largest_mib": 60.0, "hit_rate": 0.8},
        bound | {"variant": "lru by bytes", "bound_mib": 16.0, "largest_mib": 15.0, "hit_rate": 0.3},
        bound | {"variant": "fifo by entries", "bound_entries": 256.0, "largest_mib": 500.0, "hit_rate": 0.9},
    ]
    fig, axes = cache.hit_rates(rows, {"a": "letters"}, entries=256, mib=64, title="t", subtitle="s")
    drawn = lines(axes[0, 0])
    assert drawn["least recently used, bounded in bytes"] == ([15.0, 60.0], [0.3, 0.8])
    assert drawn["256 entries"] == ([500.0], [0.9]) and drawn["64 MiB"][0] == [64, 64]
    assert axes[0, 0].get_title(loc="left") == "letters" and "most MiB held" in words(fig)


def test_phase_maps_hold_each_slot():
    maps = np.linspace(-1, 1, 24).reshape(4, 2, 3)
    rows = {"columns": [("slot 0", maps[0]), ("slot 2", maps[1])], "rows": [("slot 1", maps[2]), ("slot 3", maps[3])]}
    fig, axes = rope.phase_maps(rows, "a title")
    assert [image(ax).tolist() for ax in axes.flat] == maps.tolist()
    assert "slot 3" in words(fig)


def test_wavelengths_are_hollow_where_a_slot_makes_less_than_half_a_turn():
    fig, ax = rope.wavelengths([6.0, 128.0, 129.0], {"the side": 64}, 64, "a title")
    filled, hollow = ax.lines[:2]
    assert ys(filled) == [6.0, 128.0] and ys(hollow) == [129.0]
    assert hollow.get_markerfacecolor() == "white" and "the side" in words(fig)


def test_swapped_axes_write_every_value_and_draw_cells_of_one_size():
    square, flat = np.eye(2), np.array([[0.5, -0.25, 1.0]])
    fig, axes = rope.swapped_axes({"2 x 2": [("right", square)], "1 x 3": [("right", flat)]}, "a title")
    assert [text.get_text() for text in axes[1, 0].texts] == ["+0.5", "-0.2", "+1.0"]
    assert {ax.get_xlim() for ax in axes.flat} == {(-0.5, 2.5)}
    assert "1 x 3" in words(fig)


def test_score_maps_ring_the_query():
    values = np.arange(6.0).reshape(2, 3)
    fig, axes = rope.score_maps({(1, 2): values, (0, 0): values - 3}, "a title")
    assert [ax.images[0].get_clim() for ax in axes] == [(-3, 5)] * 2
    assert xs(axes[0].lines[0])[0] == 2 and "query at row 1, column 2" in words(fig)


def test_angle_errors_name_each_line_at_its_end():
    fig, ax = rope.angle_errors([1, 2, 4], {"low": [1e-3, 0.1, 1.5], "high": [0.0, 1e-7, 1e-6]}, "a title")
    assert ys(ax.lines[0]) == [1e-3, 0.1, 1.5]
    assert math.isnan(ys(ax.lines[1])[0])
    assert {"low", "high"} <= {text.get_text() for text in ax.texts} and "largest error" in words(fig)
