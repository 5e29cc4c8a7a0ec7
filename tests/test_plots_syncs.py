"""The figures of host syncs: what is drawn is what was given."""

import numpy as np
import pytest
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.patches import Rectangle

from kimivl_lab.plots import syncs
from kimivl_lab.plots.syncs import BufferStep, Timeline
from tests.drawing import drawing, words  # noqa: F401

pytestmark = pytest.mark.usefixtures("drawing")

WAITING = Timeline(launches=[(0, 2), (2, 4), (14, 16)], waits=[(4, 14)], kernels=[(2, 5), (5, 8), (16, 19)])
FREE = Timeline(launches=[(0, 2), (2, 4)], waits=[], kernels=[(2, 5), (5, 8)])


def spans(ax, name):
    """(start, end) of the bars drawn under a name."""
    (bars,) = [one for one in ax.collections if one.get_label() == name]
    return [tuple(path.get_extents().intervalx.tolist()) for path in bars.get_paths()]


def boxes(ax, row):
    """(left, right, hatched) of the bars of a row, from left to right."""
    found = [
        one for one in ax.patches if isinstance(one, Rectangle) and one.get_y() < row < one.get_y() + one.get_height()
    ]
    return sorted((one.get_x(), one.get_x() + one.get_width(), bool(one.get_hatch())) for one in found)


def points(line):
    return [tuple(pair) for pair in np.asarray(line.get_xydata()).round(6).tolist()]


def test_idle_is_all_that_is_not_a_kernel_until_both_are_done():
    assert WAITING.idle == [(0, 2), (8, 16)]
    assert FREE.idle == [(0, 2)] and (WAITING.end, FREE.end) == (19, 8)
    assert Timeline([(0, 1)], [(1, 9)], [(1, 3)]).idle == [(0, 1), (3, 9)]


def test_every_span_of_a_timeline_is_drawn_on_one_scale():
    fig, (upper, lower) = syncs.timelines({"waiting": WAITING, "free": FREE}, axis="time, µs", title="t", subtitle="s")
    assert spans(upper, "launch") == list(WAITING.launches) and spans(upper, "host waits") == [(4, 14)]
    assert spans(upper, "kernel") == list(WAITING.kernels) and spans(upper, "device idle") == [(0, 2), (8, 16)]
    assert spans(lower, "host waits") == []
    assert upper.get_xlim() == lower.get_xlim() and upper.get_xlim()[1] > 19
    text = words(fig)
    assert all(one in text for one in ("waiting", "free", "time, µs", "host waits", "device idle"))


def test_few_launches_are_joined_to_their_kernels_and_many_are_not():
    many = Timeline([(i, i + 1) for i in range(30)], [], [(i + 1, i + 2) for i in range(30)])
    for timeline, joined in ((WAITING, [[[2, 2]], [[4, 5]], [[16, 16]]]), (many, [])):
        _, (ax,) = syncs.timelines({"one": timeline}, axis="a", title="t", subtitle="s")
        lines = [
            segment[:, 0].tolist()
            for one in ax.collections
            if isinstance(one, LineCollection)
            for segment in one.get_segments()
        ]
        assert lines == [one[0] for one in joined]


def test_waits_of_every_batch_are_drawn_at_every_depth():
    counts = {"in every layer": {1: [5, 30], 12: [5, 30]}, "never": {1: [0, 0], 12: [0, 1]}}
    fig, ax = syncs.waits_by_depth([2, 27], counts, title="t")
    marked = [points(line) for line in ax.lines if line.get_linestyle() == "None" and points(line)]
    assert marked == [[(2, 5), (27, 30)]] * 2 + [[(2, 0), (27, 0)], [(2, 0), (27, 1)]]
    low, high = ax.get_ylim()
    assert low < 0 and high > 30
    text = words(fig)
    assert all(one in text for one in ("in every layer", "never", "images in the batch", "12"))


def test_a_buffer_holds_a_batch_until_the_next_is_written():
    steps = [
        BufferStep("host", "A", 0, "A"),
        BufferStep("host", "B", 0, "B"),
        BufferStep("device", "A", 0, "B"),
        BufferStep("device", "B", 0, "B"),
    ]
    fig, (ax,) = syncs.pinned_buffers({"rewritten": steps}, title="t")
    device, buffer, host = (boxes(ax, row) for row in range(3))
    assert [hatched for *_, hatched in device] == [True, False]
    assert buffer == [(0.5, 1.5, False), (1.5, 3.5, False)]
    assert len(host) == 2 and device[0][0] > host[1][1]
    text = words(fig)
    assert all(one in text for one in ("wants A, gets B", "copies B", "writes A", "buffer 1", "rewritten"))


def test_every_fresh_buffer_has_its_own_row():
    steps = [
        BufferStep(actor, batch, number, batch) for actor in ("host", "device") for number, batch in enumerate("AB")
    ]
    fig, (ax,) = syncs.pinned_buffers({"fresh": steps}, title="t")
    assert [boxes(ax, row) for row in (1, 2)] == [[(0.5, 3.5, False)], [(1.5, 3.5, False)]]
    assert "gets" not in words(fig).replace("device gets another", "")


def test_prices_and_bands_are_drawn_as_given():
    kernels, prices = [1.0, 10.0, 100.0], {"5 µs": [26.0, 30.0, 30.0]}
    fig, (left, right) = syncs.price_of_waits(
        kernels, prices, {"30 waits": ([0.2, 0.1, 0.01], [0.6, 0.3, 0.05])},
        marks={"published": (70, 0.03)}, title="t", subtitle="s",
    )  # fmt: skip
    assert points(left.lines[0]) == [(1, 26), (10, 30), (100, 30)]
    (band,) = [one for one in right.collections if isinstance(one, PolyCollection)]
    assert set(map(tuple, np.asarray(band.get_paths()[0].vertices).round(6).tolist())) >= {
        (1, 0.2),
        (1, 0.6),
        (100, 0.05),
    }
    assert [(70, 0.03)] in [points(line) for line in right.lines]
    text = words(fig)
    assert all(one in text for one in ("5 µs", "30 waits", "published", "one wait adds, µs", "time of one kernel, µs"))


def test_published_savings_stand_over_their_prediction():
    fig, ax = syncs.published_savings(
        {"alone": (0.25, 1.2, 1.05), "under load": (0.01, 0.05, 9.9)}, title="t", subtitle="s"
    )
    bars = [one[:2] for row in (1, 0) for one in boxes(ax, row)]
    assert np.allclose(bars, [(0.25, 1.2), (0.01, 0.05)])
    assert points(ax.lines[0]) == [(1.05, 1), (9.9, 0)]
    low, high = ax.get_xlim()
    assert low < 0.01 and high > 9.9
    text = words(fig)
    assert all(one in text for one in ("alone", "under load", "1.05", "9.9", "time saved, ms"))
