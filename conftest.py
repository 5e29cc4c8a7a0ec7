"""What nbval leaves out when it compares saved and new outputs: pictures and markup."""

from typing import Any


def pytest_collectstart(collector: Any) -> None:
    """Adds to a notebook's own list, which already holds image/png and image/jpeg."""
    if hasattr(collector, "skip_compare"):
        collector.skip_compare += ("text/html", "image/svg+xml")
