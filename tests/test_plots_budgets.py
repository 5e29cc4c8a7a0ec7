"""Figures of budgets: areas are rows, and every number drawn is one that was given."""

import numpy as np
import pytest
from matplotlib.container import BarContainer
from matplotlib.patches import StepPatch

from kimivl_lab.graphs.packing import PACKERS
from kimivl_lab.planner.plan import plan_budgets
from kimivl_lab.planner.workload import count_tokens
from kimivl_lab.plots.budgets import budget_staircase, packed_replays, plan_overview, waste_bars
from tests.drawing import drawing, words  # noqa: F401

pytestmark = pytest.mark.usefixtures("drawing")

TOKENS, COUNTS = np.array([10, 40, 100]), np.array([2.0, 1.0, 1.0])


def area(stairs):
    """Between a staircase and its baseline."""
    values, edges, baseline = stairs.get_data()
    return float(((values - (0 if baseline is None else baseline)) * np.diff(edges)).sum())


def test_the_shaded_area_is_the_waste():
    fig, axes = budget_staircase(TOKENS, COUNTS, {"one": [128], "three": [16, 64, 128]}, title="a title")
    real = TOKENS @ COUNTS / 4
    for ax, waste in zip(axes, (128 - real, (2 * 16 + 64 + 128) / 4 - real), strict=True):
        shaded, images, outline = (patch for patch in ax.patches if isinstance(patch, StepPatch))
        assert area(shaded) == pytest.approx(waste)
        assert area(images) == pytest.approx(real)
        assert area(outline) == pytest.approx(real + waste)
        assert shaded.get_hatch()
    text = words(fig)
    assert "one: 3.20 times the real rows" in text and "three: 1.40 times the real rows" in text
    assert [label.get_text() for label in axes[1].texts] == ["128", "64", "16"]


def test_images_above_every_budget_are_drawn_as_they_are():
    fig, (ax,) = budget_staircase(TOKENS, COUNTS, {"small": [16, 64]}, title="a title")
    outline = ax.patches[-1]
    assert isinstance(outline, StepPatch) and outline.get_data()[0].tolist() == [16, 64, 100]
    assert "1.23 times" in words(fig)
    assert [label.get_text() for label in ax.texts] == ["64", "16"]


def test_budgets_that_lie_close_are_not_written_over_each_other():
    _, (ax,) = budget_staircase(range(90, 101), np.ones(11), {"close": list(range(90, 101))}, title="a title")
    heights = [float(label.get_text()) for label in ax.texts]
    assert min(-np.diff(heights)) > 100 / 22 and heights[0] == 100


def test_bars_are_what_is_wasted():
    waste = {"before": {1: 1.5, 8: 1.25}, "after": {1: 1.02, 8: 1.0}}
    fig, ax = waste_bars(waste, title="a title")
    bars = [[bar.get_width() for bar in one] for one in ax.containers if isinstance(one, BarContainer)]
    assert np.allclose(bars, [[0.5, 0.25], [0.02, 0]])
    assert all(label in words(fig) for label in ("50.0%  before", "2.0%  after", "0.0%  after"))
    assert [label.get_text() for label in ax.get_yticklabels()] == ["1", "8"]


def test_replays_are_drawn_to_scale():
    tokens = [90, 100, 1000, 5000]
    packed = {name: PACKERS[name](tokens, [256, 1024, 2048], 8) for name in ("next_fit", "exact")}
    fig, ax = packed_replays(tokens, packed, title="a title")
    text = words(fig)
    rows = {name: sum(replay.rows for replay in replays) for name, replays in packed.items()}
    for name, computed in rows.items():
        assert f"{name}\n{computed / sum(tokens):.2f} rows a real row" in text
    drawn = sum(bar.get_width() for one in ax.containers if isinstance(one, BarContainer) for bar in one)
    assert drawn == pytest.approx(sum(rows.values()))
    assert text.count("eager") == 2 and "2,048" in text


def test_a_plan_in_one_picture():
    sizes = [(28 * 50, 28, 7), (28 * 15, 28 * 20, 3)]
    plans = {engine: plan_budgets(sizes, (1, 2), engine=engine) for engine in ("vllm", "lab")}
    fig, axes = plan_overview("mine.csv", count_tokens(sizes), plans)
    text = words(fig)
    assert "mine.csv: CUDA-graph budgets for 10 images" in text
    assert plans["vllm"].powers_of_two is not None
    for ax, plan in zip(axes, (plans["vllm"].powers_of_two, plans["vllm"]), strict=False):
        assert f"{plan.waste[1]:.2f} times" in ax.get_title(loc="left")
    assert text.count("planned, this library") == 2
