"""The report's front picture: the newest record of the benchmark "ladder", on this machine first."""

import base64
import io

import matplotlib.pyplot as plt

from ..datasets import repository_root
from ..measure.records import DEFAULT_DIRECTORY, find_record, read_record
from ..plots.ladder import ladder_waterfall
from .page import Picture


def ladder_picture() -> Picture | None:
    """Its waterfall; None while no such record exists."""
    for directory in (DEFAULT_DIRECTORY, repository_root() / "data" / "measurements"):
        try:
            rows, origin = read_record(find_record("ladder", directory))
        except FileNotFoundError:
            continue
        fig, _ = ladder_waterfall(rows, f"{origin['device']}  ·  {origin['date'][:10]}")
        buffer = io.BytesIO()
        fig.savefig(buffer, dpi=160)
        plt.close(fig)
        first, last = rows[0], rows[-1]
        words = f"Latency of one batch, {first['variant']} to {last['variant']}, measured on {origin['device']}."
        return Picture(base64.b64encode(buffer.getvalue()).decode(), words)
    return None
