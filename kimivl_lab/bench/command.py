"""What every benchmark's command line shares: its options, progress on stderr, one JSON document as the last line."""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..measure.records import DEFAULT_DIRECTORY
from ..measure.timing import TIMERS


def parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Options --quick, --out, --device, --seed; a benchmark adds its own. `doc`: the benchmark's docstring."""
    summary = (doc or "").splitlines()[0]
    options = argparse.ArgumentParser(prog=f"python -m kimivl_lab.bench.{name}", description=summary)
    options.add_argument("--quick", action="store_true", help="fewer cases and repeats")
    options.add_argument("--out", type=Path, default=DEFAULT_DIRECTORY, help="folder of the records (%(default)s)")
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="%(default)s here")
    options.add_argument("--seed", type=int, default=0, help="of the drawn sizes and contents (%(default)s)")
    return options


def settings(options: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """Provenance of a run: its seed and timer, and what the benchmark adds (warmup, repeats)."""
    return {"seed": options.seed, "timer": TIMERS[torch.device(options.device).type], **more}


def name(dtype: torch.dtype) -> str:
    """A dtype's name in records: "float32"."""
    return str(dtype).removeprefix("torch.")


def progress(text: str) -> None:
    """One line on stderr."""
    print(text, file=sys.stderr, flush=True)


def finish(summary: Mapping[str, Any]) -> None:
    """Prints the benchmark's result as one JSON line."""
    print(json.dumps(summary))
