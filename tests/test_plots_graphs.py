"""Figures of graphs: lengths and areas are the numbers that were given, and labels say them."""

import numpy as np
import pytest
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.patches import StepPatch

from kimivl_lab.measure.timing import Timing
from kimivl_lab.planner.workload import TokenCounts
from kimivl_lab.plots.graphs import launch_timeline, recorded_replays, replay_steps, time_ratios, two_staircases
from tests.drawing import drawing, words  # noqa: F401

pytestmark = pytest.mark.usefixtures("drawing")


def spans(bars):
    """(start, length) of the boxes of one broken bar."""
    boxes = [path.get_extents() for path in bars.get_paths()]
    return [(box.x0, box.width) for box in boxes]


def test_launches_and_kernels_are_drawn_where_they_are():
    eager = ([(0, 1), (1, 1)], [(1, 0.5), (2, 0.5)])
    graph = ([(0, 1)], [(1, 0.5), (1.5, 0.5)])
    fig, ax = launch_timeline({"eager": eager, "graph": graph}, title="a title", subtitle="s")
    drawn = [spans(bars) for bars in ax.collections if isinstance(bars, PolyCollection)]
    assert np.allclose([span for lane in drawn for span in lane], [span for lane in (*eager, *graph) for span in lane])
    assert "2.5 launches, device busy 40%" in words(fig) and "2.0 launches, device busy 50%" in words(fig)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["eager: host", "device", "graph: host", "device"]


def area(stairs):
    """Between a staircase and its baseline."""
    values, edges, baseline = stairs.get_data()
    return float(((values - (0 if baseline is None else baseline)) * np.diff(edges)).sum())


def test_areas_between_staircases_are_what_each_wastes():
    workload = TokenCounts(np.array([10, 40, 100]), np.array([2.0, 1.0, 1.0]))
    fig, (ax,) = two_staircases({"w": workload}, {"w": ([64, 128], [10, 40, 110])}, ("twos", "planned"), title="t")
    more, wasted, images, *_ = (patch for patch in ax.patches if isinstance(patch, StepPatch))
    real, first, second = 40.0, (64 + 64 + 64 + 128) / 4, (10 + 10 + 40 + 110) / 4
    assert [area(one) for one in (images, wasted, more)] == pytest.approx([real, second - real, first - second])
    assert more.get_hatch()
    text = words(fig)
    assert f"w: {first / real:.2f} to {second / real:.2f} times" in text
    assert all(label in text for label in ("more with twos", "for nothing with planned", "images, sorted by tokens"))


def test_where_the_second_staircase_is_higher_nothing_is_more_with_the_first():
    workload = TokenCounts(np.array([500]), np.array([3.0]))
    _, (ax,) = two_staircases({"w": workload}, {"w": ([512], [600])}, ("twos", "planned"), title="t")
    more, wasted, *_ = (patch for patch in ax.patches if isinstance(patch, StepPatch))
    assert area(more) == 0 and area(wasted) == 100
    assert ax.get_ylim()[1] > 600


def exactly(ms):
    return Timing(ms, ms, ms, 1)


def corners(ax, kind):
    """(n, 2) points of every path of the collections of one kind."""
    found = [path for one in ax.collections if isinstance(one, kind) for path in one.get_paths()]
    return [np.asarray(path.vertices) for path in found]


def test_a_replay_costs_the_same_from_the_budget_below_to_its_own():
    eager = [exactly(ms) for ms in (1.0, 2.0, 4.0)]
    replays = {2: Timing(1.2, 1.5, 1.6, 3), 4: exactly(3.0)}
    fig, ax = replay_steps([1, 2, 4], eager, replays, {"host": [1, 1, 1]}, title="t", subtitle="s")
    lines = corners(ax, LineCollection)
    steps = [line for line in lines if line[0, 1] == line[1, 1] and line[0, 0] != line[1, 0]]
    assert np.allclose(steps, [[(2**-0.5, 1.5), (2, 1.5)], [(2, 3), (4, 3)]])
    assert any(np.allclose(line, [(2, 1.2), (2, 1.6)]) for line in lines), "the spread at the budget"
    labels = {line.get_label(): np.asarray(line.get_ydata()).tolist() for line in ax.lines}
    assert labels["host"] == [1, 1, 1]
    assert all(label in words(fig) for label in ("eager", "replay", "a graph costs more than eager"))


def test_only_what_lies_above_eager_is_shaded():
    cheap = {4: exactly(0.5)}
    _, ax = replay_steps([1, 4], [exactly(1.0), exactly(2.0)], cheap, {}, title="t", subtitle="s")
    assert corners(ax, PolyCollection) == []
    _, ax = replay_steps([1, 4], [exactly(1.0), exactly(2.0)], {4: exactly(1.5)}, {}, title="t", subtitle="s")
    (shaded,) = corners(ax, PolyCollection)
    assert shaded[:, 0].max() < 4 and shaded[:, 1].max() == 1.5


def test_faster_and_slower_lie_on_their_sides_of_one():
    fig, ax = time_ratios({"a": 0.5, "b": 2.0}, title="t", subtitle="s")
    marks = {str(line.get_marker()): np.asarray(line.get_xydata()).tolist() for line in ax.lines}
    assert marks["o"] == [[0.5, 0]] and marks["s"] == [[2, 1]]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]
    assert "0.50" in words(fig) and "2.00" in words(fig)
    low, high = ax.get_xlim()
    assert low < 0.5 and high > 2


def call(budget, tokens, eager, replay):
    """The rows of one whole call."""
    return [
        {"phase": "budget", "variant": way, "budget_tokens": budget, "tokens": tokens}
        | {"latency_ms_p20": 0.95 * ms, "latency_ms_p50": ms, "latency_ms_p80": 1.1 * ms}
        for way, ms in (("eager", eager), ("replay", replay))
    ]


def capture(budget, ms, mib):
    return {"phase": "capture", "variant": "replay", "budget_tokens": budget, "capture_ms": ms, "pool_mib": mib}


CALLS = [*call(4.0, 2.0, 10.0, 9.0), *call(4.0, 4.0, 10.0, 5.0), *call(64.0, 32.0, 20.0, 38.0)]
CALLS += [*call(64.0, 64.0, 40.0, 39.0), {"phase": "host", "variant": "eager", "budget_tokens": None, "tokens": 4.0}]


def drawn_ys(ax):
    return [np.asarray(line.get_ydata()) for line in ax.lines]


def test_recorded_replays_are_lines_by_filling_and_captures_are_earned_back():
    rows = [*CALLS, capture(4.0, 500.0, 0.0), capture(64.0, 900.0, 60.5)]
    fig, (left, right) = recorded_replays(rows, title="t", subtitle="s")
    drawn = {str(line.get_label()): np.asarray(line.get_ydata()) for line in left.lines}
    assert drawn["50% full"] == pytest.approx([0.9, 1.9]) and drawn["100% full"] == pytest.approx([0.5, 0.975])
    spreads = [(line[0, 1], line[1, 1]) for line in corners(left, LineCollection)]
    eager = [(0.95, 1.1)] * 2
    assert np.allclose(spreads, [*eager, (0.855, 0.99), (1.805, 2.09), *eager, (0.475, 0.55), (0.92625, 1.0725)])
    limits = [float(y[0]) for y in drawn_ys(left) if len(y) and len(set(y.tolist())) == 1]
    assert limits == [2, 1]
    (costs,) = right.lines
    assert np.asarray(costs.get_xydata()).tolist() == [[0, 500], [1, 900]]
    text = words(fig)
    assert "100\ncalls" in text and "spreads\noverlap" in text and "2 times the rows" in text
    assert [label.get_text() for label in right.get_xticklabels()] == ["4\n+0", "64\n+60.5"]
    assert left.get_ylabel() == "whole call: time of a replay / eager" and right.get_ylabel() == "one capture, ms"


def test_more_fillings_than_marks_are_refused():
    rows = [row for tokens in (1.0, 2.0, 3.0, 4.0) for row in call(4.0, tokens, 2.0, 1.0)]
    with pytest.raises(ValueError, match="3 fillings, not 4"):
        recorded_replays([*rows, capture(4.0, 1.0, 0.0)], title="t", subtitle="s")
