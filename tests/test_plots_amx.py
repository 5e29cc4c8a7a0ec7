"""The figures of the AMX kernels: what is drawn is what was given."""

import numpy as np
import pytest

from kimivl_lab.plots import amx
from tests.drawing import drawing, words  # noqa: F401

pytestmark = pytest.mark.usefixtures("drawing")


def marks(ax, marker):
    """(x, y) of the points drawn with a marker, lines of the legend left out."""
    lines = [line for line in ax.lines if line.get_marker() == marker and len(line.get_xdata())]
    return [tuple(point) for line in lines for point in np.asarray(line.get_xydata()).round(6).tolist()]


def test_the_marked_head_size_stands_on_each_curve():
    shares = {"first": [1.0, 0.75, 0.8], "second": [0.8, 0.9, 0.7], "both": [0.9, 0.82, 0.75]}
    fig, ax = amx.useful_share([64, 72, 80], shares, 72, title="t")
    assert marks(ax, "o") == [(72, 0.75), (72, 0.9), (72, 0.82)]
    drawn = {line.get_label(): np.asarray(line.get_ydata()).tolist() for line in ax.lines if line.get_label() in shares}
    assert drawn == shares
    text = words(fig)
    assert all(word in text for word in ("75%", "90%", "82%", "head size 72", *shares))
    assert ax.get_ylim()[0] < 0.7 and ax.get_ylim()[1] > 1


def test_running_maxima_are_marked_where_they_are_raised():
    here, top = [[3.0, 1.0], [9.0, 2.0], [30.0, 1.0]], [[3.0, 1.0], [3.0, 1.0], [30.0, 1.0]]
    slack = amx.Maxima(here, top, [[False, False], [False, False], [True, False]])
    none = amx.Maxima(here, [[3.0, 1.0], [9.0, 2.0], [30.0, 2.0]], [[False, False], [True, True], [True, False]])
    panels = {"slack 0": none, "slack 8": slack}
    fig, (left, right) = amx.running_maxima(panels, ["steep", "flat"], 128, title="t", slack=[0, 8])
    assert marks(right, "^") == [(256, 30)] and marks(right, "s") == []
    assert marks(left, "^") == [(128, 9), (256, 30)] and marks(left, "s") == [(128, 2)]
    assert marks(left, ".") == marks(right, ".") == [(64, 3), (192, 9), (320, 30), (64, 1), (192, 2), (320, 1)]
    assert right.get_xlim() == (0, 384)
    text = words(fig)
    assert all(word in text for word in ("steep: 2 rescalings", "steep: 1 rescalings", "flat: 0 rescalings"))
    shaded = right.collections[0].get_paths()[0].get_extents()
    assert (shaded.ymin, shaded.ymax) == (3, 38)


def row(case, variant, patches, p50, **more):
    return {"case": case, "variant": variant, "patches": patches, "latency_ms_p50": p50} | {
        "latency_ms_p20": 0.8 * p50,
        "latency_ms_p80": 1.25 * p50,
        **more,
    }


def test_recorded_times_ratios_and_shares():
    attention = [
        row("8 of coco_val2017", "sdpa", 9000, 140.0),
        row("8 of coco_val2017", "amx", 9000, 70.0),
        row("32x32", "sdpa", 1024, 9.0),
        row("32x32", "amx", 1024, 6.0),
        row("32x32", "sdpa_masked", 1024, 11.0),
    ]
    encoder = [
        row("64x64", "transformers", 4096, 7000.0, peak_share=0.5),
        row("64x64", "open-moonvit", 4096, 6500.0, peak_share=0.55),
        row("64x64", "kimivl_lab", 4096, 3500.0, peak_share=0.9),
    ]
    towers = {"open-moonvit": "open-moonvit", "transformers": "transformers", "kimivl_lab": "ours"}
    backends = {"sdpa": "sdpa", "amx": "ours"}
    fig, (left, right) = amx.recorded_wins(attention, encoder, backends, towers, title="t", subtitle="s")
    assert marks(left, "D") == [(9, 1), (140, 0)] and marks(left, "o") == [(6, 1), (70, 0)]
    assert marks(right, "s") == [(0.55, 0)] and marks(right, "D") == [(0.5, 0)] and marks(right, "o") == [(0.9, 0)]
    text = words(fig)
    assert all(word in text for word in ("1.5x", "2.0x", "32 x 32\n1,024", "8 photographs (COCO)\n9,000", "64 x 64"))
    assert all(word in text for word in ("7.00 s", "6.50 s", "3.50 s"))
    spread = [path.get_extents() for line in right.collections[1:] for path in line.get_paths()]
    assert np.allclose([(one.xmin, one.xmax) for one in spread], [(0.44, 0.6875), (0.4, 0.625), (0.72, 1.125)])


def test_a_case_that_is_no_workload_keeps_its_name():
    rows = [row("16 of 16x16", name, 4096, value) for name, value in (("sdpa", 2.0), ("amx", 1.0))]
    share = [one | {"peak_share": 0.5} for one in rows]
    names = {"sdpa": "sdpa", "amx": "ours"}
    fig, _ = amx.recorded_wins(rows, share, names, names, title="t", subtitle="s")
    assert "16 of 16 x 16\n4,096 patches" in words(fig)
