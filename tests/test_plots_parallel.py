"""The figures of several ranks and of the cost model: what is drawn is what was given."""

from collections import Counter

import numpy as np
import pytest
from matplotlib.collections import LineCollection
from matplotlib.container import BarContainer
from matplotlib.patches import Circle, Rectangle

from kimivl_lab import MoonViTConfig
from kimivl_lab.measure.timing import Timing
from kimivl_lab.parallel.cost_model import ScalingPoint
from kimivl_lab.plots import cost_model, parallel
from tests.drawing import drawing, words  # noqa: F401

pytestmark = pytest.mark.usefixtures("drawing")

CONFIG = MoonViTConfig.preset("kimi-vl-a3b")


def points(line):
    """[x, y] of a line's points."""
    return np.asarray(line.get_xydata()).tolist()


def area_by_rank(ax):
    """Filled area of each rank's colour, in units of D x D."""
    areas = Counter()
    for patch in ax.patches:
        if isinstance(patch, Rectangle):
            areas[patch.get_facecolor()] += patch.get_width() * patch.get_height()
    return areas


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_one_copy_or_hold_one_each(ranks):
    fig, (tensor, data) = parallel.who_holds_what(CONFIG, ranks, "t")
    text = words(fig)
    assert all(f"rank {rank}" in text for rank in range(ranks)) and "D = 1,152, F = 4,304" in text
    layer = 4 + 2 * 4304 / 1152  # D x D: wqkv 3, wo 1, fc0 and fc1
    rows = 2.1 * (3 + 3 + 4304 / 1152)  # three x, q k v, hidden
    divided, whole = area_by_rank(tensor), area_by_rank(data)
    shared = 3 * 2.1
    assert sorted(divided.values()) == pytest.approx(sorted([*[(layer + rows - shared) / ranks] * ranks, shared]))
    assert sorted(whole.values()) == pytest.approx([layer + rows / ranks] * ranks)
    assert [sum(isinstance(patch, Circle) for patch in ax.patches) for ax in (tensor, data)] == [2, 1]
    assert text.count("all-reduce") == 2 and text.count("gather") == 1


def recorded(case, ms, auto, collectives, predicted=1.0):
    """One batch's rows: modes by their median, auto with the collectives of its choice."""
    rows = [
        {"case": case, "variant": mode, "ranks_count": 2.0, "patches": 1024.0, "collective_count": count}
        | {"latency_ms_p20": 0.9 * p50, "latency_ms_p50": p50, "latency_ms_p80": 1.2 * p50}
        | {"predicted_ms": predicted * p50}
        for (mode, p50), count in zip((ms | {"auto": auto}).items(), (0, 1, 12, collectives), strict=True)
    ]
    return rows


def test_recorded_modes_stand_over_one_rank_with_what_auto_chose():
    shared = recorded("8 of coco_val2017", {"single": 1000.0, "data": 500.0, "tensor": 700.0}, 510.0, 1)
    cut = recorded("1 of 40x40", {"single": 200.0, "data": 210.0, "tensor": 120.0}, 126.0, 12, predicted=1.1)
    fig, ax = parallel.recorded_modes(shared + cut, title="t", subtitle="s")
    drawn = {str(line.get_label()): points(line) for line in ax.lines if points(line)}
    ratios = {"one rank": [1, 1], "data parallel": [1.05, 0.5], "tensor parallel": [0.6, 0.7], "auto": [0.63, 0.51]}
    assert {mode: [x for x, _ in drawn[mode]] for mode in ratios} == {
        mode: pytest.approx(ratios[mode]) for mode in ratios
    }
    assert [round(y) for _, y in drawn["auto"]] == [0, 1], "the batch to cut comes first"
    ticks = [points(line) for line in ax.lines if line.get_marker() == "|" and points(line)]
    assert [[x for x, _ in tick] for tick in ticks] == [pytest.approx([1.1 * a, b]) for a, b in ratios.values()]
    spreads = [bar for one in ax.collections if isinstance(one, LineCollection) for bar in one.get_segments()]
    assert [(bar[0][0], bar[1][0]) for bar in spreads[-2:]] == [
        pytest.approx((0.9 * x, 1.2 * x)) for x in ratios["auto"]
    ]
    text = words(fig)
    assert "tensor, 1.05x" in text and "data, 1.02x" in text and "time / time of one rank" in text and "1 / 2" in text
    assert "1 of 40 x 40\n1,024 patches, 200 ms on one rank" in text and "8 photographs (COCO)\n1,024" in text


@pytest.mark.parametrize("ranks", [1, 5])
def test_more_ranks_than_colours_are_refused(ranks):
    with pytest.raises(ValueError, match=f"2 to 4 ranks, not {ranks}"):
        parallel.who_holds_what(CONFIG, ranks, "t")


def test_schedule_draws_every_image_and_every_wait():
    panels = {"uneven": [[(4096, 8.0)], [(64, 1.0), (1024, 2.0)], []], "even": [[(4096, 4.0)], [(64, 4.0)], [(9, 4.0)]]}
    fig, (uneven, even) = parallel.schedule(panels, 4.0, axis="predicted time, ms", title="t", subtitle="s")
    bars = [bar for group in uneven.containers if isinstance(group, BarContainer) for bar in group]
    drawn = [(round(bar.get_y() + 0.37), bar.get_x(), bar.get_width()) for bar in bars if not bar.get_hatch()]
    assert drawn == [(0, 0, 8), (1, 0, 1), (1, 1, 2)]
    waits = [(round(bar.get_y() + 0.37), bar.get_x(), bar.get_width()) for bar in bars if bar.get_hatch()]
    assert waits == [(0, 8, 0), (1, 3, 5), (2, 0, 8)]
    text = words(fig)
    assert "uneven: slowest rank 100.0% over the bound, 54% of the ranks' time waited" in text
    assert "even: slowest rank 0.0% over the bound, 0% of" in text and "4,096" in text and "predicted time, ms" in text
    assert uneven.get_xlim() == even.get_xlim()


def test_bytes_climb_by_two_a_layer_and_end_at_the_sum():
    fig, ax = parallel.bytes_through_layers(27, 9.437184, 9.437184, "t")
    steps, gather = ax.lines
    xs, ys = np.asarray(steps.get_xdata()), np.asarray(steps.get_ydata())
    assert len(xs) == 55 and xs[-1] == 27 and ys[-1] == pytest.approx(54 * 9.437184)
    assert np.asarray(gather.get_ydata()).tolist() == [0, 0, 9.437184, 9.437184]
    text = words(fig)
    assert "54 x 9.437 = 509.6 MB" in text and "54 times less" in text and "layers done" in text


def test_predictions_lie_where_they_were_measured():
    around = {ms: Timing(0.8 * ms, ms, 1.25 * ms, 5) for ms in (6, 8, 10, 20, 100)}
    pairs = {"single": [(around[10], 11)], "data": [(around[6], 6)], "tensor": [(around[8], 4), (around[100], 120)]}
    fig, (left, right) = cost_model.predicted_against_measured(
        pairs, {"single": [(around[20], 20)]}, 0.15, title="t", subtitle="a machine, a date"
    )
    drawn = {line.get_label(): points(line) for line in left.lines}
    assert drawn["one rank"] == [[10, 11]] and drawn["tensor parallel"] == [[8, 4], [100, 120]]
    errors = [y for line in right.lines if line.get_marker() == "s" for y in np.asarray(line.get_ydata())]
    assert errors == pytest.approx([-0.5, 0.2])
    bars = [bar for one in right.collections if isinstance(one, LineCollection) for bar in one.get_segments()]
    assert {bar[0][0]: (bar[0][1], bar[1][1]) for bar in bars}[100] == pytest.approx((120 / 125 - 1, 120 / 80 - 1))
    assert right.get_ylim()[0] < -0.5, "the worst is in the picture"
    text = words(fig)
    assert "measured, ms" in text and "predicted, ms" in text and "a machine, a date" in text


def test_crossover_map_outlines_where_tensor_parallel_wins():
    ratios = np.array([[2.0, 0.5, 0.25], [4.0, 2.0, 0.8]])
    fig, (ax,) = cost_model.crossover_map(
        {"2 ranks, simulated": ratios}, [64, 512, 4096], [1, 8], title="t", subtitle=""
    )
    assert np.allclose(np.asarray(ax.images[0].get_array()), np.log2(ratios))
    edges = {tuple(map(tuple, points(line))) for line in ax.lines if points(line)}
    assert edges == {
        ((0.5, -0.5), (0.5, 0.5)),  # 64 | 512 of one image
        ((0.5, 0.5), (1.5, 0.5)),  # one | eight images of 512
        ((1.5, 0.5), (1.5, 1.5)),  # 512 | 4096 of eight images
    }
    text = words(fig)
    assert all(number in text for number in ("2.0", "4.0", "1.2", "1/4", "2 ranks, simulated", "patches of one image"))


def test_scaling_keeps_simulated_marks_hollow():
    given = [
        ScalingPoint("data", 1, 2.0, 1.0, False),
        ScalingPoint("data", 2, 1.0, 2.0, False),
        ScalingPoint("data", 64, 0.1, 20.0, True),
        ScalingPoint("tensor", 2, 1.5, 4 / 3, True),
    ]
    fig, (ax,) = cost_model.scaling({"a batch": given}, title="t", subtitle="simulated")
    hollow = [p for line in ax.lines if line.get_markerfacecolor() == "white" for p in points(line)]
    assert hollow == [[64, 20], [2, pytest.approx(4 / 3)]]
    text = words(fig)
    assert "hollow: simulated" in text and "a batch" in text and "speed-up over one rank" in text
