"""What every run of tests and notebooks shares: inline figures, what nbval compares, what was not tested here."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.pop("MPLBACKEND", None)  # kernels inherit it, and anything but their own default leaves the figures out

NOT_TESTED = {
    "needs a CUDA device": "CUDA",
    "AMX": "AMX",
    "needs AVX-512": "AVX-512",
    "needs AVX2": "AVX2",
}  # what a reason for skipping says -> what was not tested


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="many more cases of the fuzz tests")


@pytest.fixture
def is_long(request: pytest.FixtureRequest) -> bool:
    """Whether the fuzz tests run all their cases."""
    return request.config.getoption("--long")


def pytest_collectstart(collector: Any) -> None:
    """nbval compares neither pictures nor markup: adds to a notebook's list, which holds image/png and image/jpeg."""
    if hasattr(collector, "skip_compare"):
        collector.skip_compare += ("text/html", "image/svg+xml")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any) -> Iterator[None]:
    """One loud line, after all others, for each kind of hardware that this machine does not have."""
    yield
    skipped = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    for reason, hardware in NOT_TESTED.items():
        if count := sum(reason in one for one in skipped):
            text = f"NOT TESTED HERE: {count} tests need {hardware}, which this machine does not have"
            terminalreporter.write_line(text, red=True, bold=True)
