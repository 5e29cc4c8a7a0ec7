"""The front picture: the newest record of the benchmark "ladder" as a waterfall, on the report and in the README.

    python -m kimivl_lab.report.ladder data/figures/front.png

draws the newest one of data/measurements; the picture says in its metadata which record it shows.

Test: tests/test_report.py.
"""

import base64
import hashlib
import io
import sys
from pathlib import Path

import matplotlib.pyplot as plt

from ..datasets import repository_root
from ..measure.records import DEFAULT_DIRECTORY, FILE_NAME, find_record, read_record
from ..plots.floor import ladder_waterfall
from ..plots.style import use_style
from .page import Picture


def ladder_picture() -> Picture | None:
    """The waterfall of this machine's own record, or else of the kept one; None while there is neither."""
    for directory in (DEFAULT_DIRECTORY, kept_records()):
        try:
            path = find_record("ladder", directory)
        except FileNotFoundError:
            continue
        rows, origin = read_record(path)
        first, last = rows[0], rows[-1]
        words = f"Latency of one batch, {first['variant']} to {last['variant']}, measured on {origin['device']}."
        return Picture(base64.b64encode(draw(path)).decode(), words)
    return None


def draw(path: Path) -> bytes:
    """One record's waterfall as a PNG."""
    rows, origin = read_record(path)
    match = FILE_NAME.fullmatch(path.name)
    assert match is not None
    batch = f"{origin['preset']} preset, {rows[0]['patches']:,.0f} patches, {match['dtype']}"
    buffer = io.BytesIO()
    with plt.rc_context():
        use_style()
        fig, _ = ladder_waterfall(rows, f"{origin['device']}  ·  {origin['date'][:10]}  ·  {batch}")
        fig.savefig(buffer, dpi=160, metadata={"Source": source_of(path)})
        plt.close(fig)
    return buffer.getvalue()


def source_of(path: Path) -> str:
    """A record's name and the digest of its rows."""
    return f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"


def kept_records() -> Path:
    return repository_root() / "data" / "measurements"


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(draw(find_record("ladder", kept_records())))
