"""Chromium, if the machine has it: where its program is, and the command that starts it without a window.

Test: tests/test_report_browser.py.
"""

import os
import shutil
from pathlib import Path

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_chromium() -> str | None:
    """The path of the first Chromium or Chrome that is installed."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


def headless(program: str, profile: Path) -> list[str]:
    """The command that starts Chromium without a window, with an empty profile in the folder `profile`, and without the
    connections that it opens for itself. Without an own process for graphics it also starts in a small container."""
    sandbox = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []  # as root it starts only so
    quiet = ["--disable-background-networking", "--disable-component-update", "--no-first-run", "--disable-sync"]
    return [
        program,
        "--headless",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        *sandbox,
        *quiet,
        f"--user-data-dir={profile}",
    ]
