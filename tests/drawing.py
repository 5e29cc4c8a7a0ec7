"""What the tests of the figures share."""

import matplotlib
import matplotlib.pyplot as plt
import pytest
from matplotlib.text import Text
from PIL import Image

from kimivl_lab import image_geometry, plots


@pytest.fixture
def drawing():
    """The project's style on a backend without a screen; everything as it was afterwards."""
    backend = matplotlib.get_backend()
    matplotlib.use("Agg")
    plots.use_style()
    yield
    plt.close("all")
    matplotlib.use(backend)
    matplotlib.rcdefaults()


def picture(width, height):
    return Image.new("RGB", (width, height), "green"), image_geometry(width, height)


def words(fig):
    """Every text of a drawn figure; drawing also proves that the figure can be laid out."""
    fig.canvas.draw()
    return " ".join(text.get_text() for text in fig.findobj(Text))
