"""One look for every figure: colours, type sizes, titles, and the line that says where the numbers come from.

Test: tests/test_plots.py.
"""

import datetime
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from ..measure.provenance import device_name

# Lightness (CIE L*) 15, 41, 63, 76, 91 keeps them apart in greyscale, and with it for colour-blind readers.
COLORS = {"navy": "#0b2545", "blue": "#2f6690", "orange": "#e57f2a", "sky": "#8fc1e3", "sand": "#f6e3b4"}
INK, GREY, LIGHT = "#1c1f24", "#6a7079", "#d9dce1"
COUNTED = "counted, not timed: the same on every machine"
COMPUTED = "computed, not timed: the same on every machine"

_HEADER_INCHES = 0.68


def use_style() -> None:
    """Sets matplotlib's defaults; call once, before the first figure."""
    plt.rcParams.update(mpl.rcParamsDefault | {"backend": plt.rcParams["backend"]})
    plt.rcParams.update(
        {
            "figure.dpi": 110,
            "figure.facecolor": "white",
            "savefig.facecolor": "white",
            "font.size": 11,
            "text.color": INK,
            "axes.edgecolor": GREY,
            "axes.labelcolor": INK,
            "axes.labelsize": 11,
            "axes.titlesize": 11.5,
            "axes.titlelocation": "left",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.axisbelow": True,
            "axes.grid": True,
            "axes.prop_cycle": cycler(color=list(COLORS.values())[:4]),
            "grid.color": LIGHT,
            "grid.linewidth": 0.8,
            "xtick.color": INK,
            "ytick.color": INK,
            "legend.frameon": False,
            "legend.fontsize": 10.5,
            "lines.linewidth": 2.2,
            "hatch.linewidth": 0.9,
            "image.interpolation": "nearest",
        }
    )


def new_figure(width: float = 9.0, height: float = 4.5, **subplots: Any) -> tuple[Figure, Any]:
    """`plt.subplots` of a size in inches, laid out below the room that `set_titles` writes in."""
    fig, ax = plt.subplots(figsize=(width, height), layout="constrained", **subplots)
    leave_header(fig)
    return fig, ax


def leave_header(fig: Figure) -> None:
    """Keeps the top of a constrained layout free for `set_titles`."""
    engine = fig.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    engine.set(rect=(0, 0, 1, 1 - _HEADER_INCHES / fig.get_figheight()))


def set_titles(fig: Figure, title: str, subtitle: str) -> None:
    """What the figure shows, in words, and below it where its numbers come from."""
    height = fig.get_figheight()
    fig.text(0.008, 1 - 0.04 / height, title, ha="left", va="top", fontsize=14, fontweight="bold")
    fig.text(0.008, 1 - 0.36 / height, subtitle, ha="left", va="top", fontsize=10.5, color=GREY)


def name_lines(ax: Axes) -> None:
    """Leaves only the names of a chart's lines on its y axis: no ticks, no grid."""
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", visible=False)


def measured_on(device: str = "cpu", note: str = "") -> str:
    """The subtitle of a live measurement: device, today's date, and how it was measured."""
    parts = [device_name(device), datetime.date.today().isoformat(), note]
    return "  ·  ".join(part for part in parts if part)
