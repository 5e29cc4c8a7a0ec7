"""Measured data on disk: `<benchmark>__<device>__<dtype>__<yyyymmdd>.csv` and a `.json` sidecar of the same name.

Rows are written as they are measured, so a run that dies keeps its rows. Column names contain their units. Every record
has the accuracy column `relative_error` (against the float32 reference, 0 = bit-equal); the sidecar holds the
provenance.

Test: tests/test_records.py.
"""

import csv
import datetime
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from .provenance import device_slug, instruction_set, provenance

DEFAULT_DIRECTORY = Path("build") / "measurements"

FILE_NAME = re.compile(r"(?P<benchmark>[a-z0-9_]+)__(?P<device>[a-z0-9-]+)__(?P<dtype>[a-z0-9]+)__(?P<date>\d{8})\.csv")
REQUIRED_COLUMNS = ("case", "variant", "relative_error")
REQUIRED_PROVENANCE = ("date", "commit", "dirty", "command", "device", "threads", "versions")
_UNITS = re.compile(
    r"(_(ms|us|s|bytes|mib|gib|tflops|gflops|gbps|mpixels_per_s)(_p\d\d)?"
    r"|_share|_ratio|_rate|_count|_patches|_tokens|_entries|_x)$"
)
_UNITLESS = {"relative_error", "repeats", "seed", "images", "patches", "tokens", "grids", "entries", "threads"}


class Recorder:
    """Writes one record; use as a context manager.

    Args:
        benchmark: lower case with underscores, the module's name in `kimivl_lab.bench`.
        dtype: of the work measured ("float32", "bfloat16", "mixed", ...).
        columns: every column of the table, in order.
        directory: created when missing. A record of the same day on the same device is replaced.
        settings: further provenance (warmup, repeats, seed, timer, sizes).
    """

    def __init__(
        self,
        benchmark: str,
        dtype: str,
        columns: Sequence[str],
        *,
        directory: Path | str = DEFAULT_DIRECTORY,
        device: torch.device | str = "cpu",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        day = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d")
        self.path = Path(directory) / f"{benchmark}__{device_slug(device)}__{dtype}__{day}.csv"
        problems = [] if FILE_NAME.fullmatch(self.path.name) else [f"bad record name {self.path.name}"]
        problems += _column_problems(columns)
        if problems:
            raise ValueError("; ".join(problems))
        self.columns = list(columns)
        self.rows: list[dict[str, Any]] = []
        self._provenance = provenance(device, **(settings or {}))

    def __enter__(self) -> "Recorder":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("w", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, self.columns, lineterminator="\n")
        self._writer.writeheader()
        self._write_sidecar(finished=False)
        return self

    def add(self, row: Mapping[str, Any]) -> None:
        """Appends one row and flushes it to disk. A missing column is left empty; an unknown one is an error."""
        self._writer.writerow(row)
        self._file.flush()
        self.rows.append(dict(row))

    def describe(self, **settings: Any) -> None:
        """Adds provenance that is known only while the work runs, such as the version of a server."""
        self._provenance |= settings
        self._write_sidecar(finished=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._write_sidecar(finished=kind is None)

    def _write_sidecar(self, *, finished: bool) -> None:
        text = json.dumps(self._provenance | {"finished": finished}, indent=1) + "\n"
        self.path.with_suffix(".json").write_text(text, encoding="utf-8")


def read_record(path: Path | str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows (numbers as float, empty cells as None) and provenance of one record."""
    path = Path(path)
    with path.open(newline="", encoding="utf-8") as file:
        rows = [{key: _value(text) for key, text in row.items()} for row in csv.DictReader(file)]
    return rows, json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))


def find_record(benchmark: str, directory: Path | str, *, device: str = "*", dtype: str = "*") -> Path:
    """The record of a benchmark in `directory` that fits this machine best; of several, the newest.

    First one of this machine's own processor or GPU, then one of the same kind (CPU or GPU), then one of a processor
    with the same instruction set. `device` and `dtype` may be glob patterns.
    """
    kinds = ("cpu", "cuda")[: 1 + torch.cuda.is_available()]
    here, on_cpu, isa = [device_slug(kind) for kind in kinds], kinds == ("cpu",), instruction_set()

    def fit(path: Path) -> tuple[Any, ...]:
        slug, sidecar = path.stem.split("__")[1], path.with_suffix(".json")
        same_isa = sidecar.exists() and json.loads(sidecar.read_text(encoding="utf-8")).get("isa") == isa
        return slug in here, slug.startswith("cpu-") == on_cpu, same_isa, path.stem[-8:], path.stem

    found = list(Path(directory).glob(f"{benchmark}__{device}__{dtype}__*.csv"))
    if not found:
        raise FileNotFoundError(f"no record of {benchmark!r} (device {device}, dtype {dtype}) in {directory}")
    return max(found, key=fit)


def record_problems(path: Path | str) -> list[str]:
    """The problems of a record, one line each; an empty list means that it is valid."""
    path = Path(path)
    if not FILE_NAME.fullmatch(path.name):
        return [f"{path.name}: not <benchmark>__<device>__<dtype>__<yyyymmdd>.csv"]
    if not path.with_suffix(".json").exists():
        return [f"{path.name}: no sidecar {path.with_suffix('.json').name}"]
    rows, origin = read_record(path)
    problems = [f"{path.name}: sidecar lacks {key!r}" for key in REQUIRED_PROVENANCE if key not in origin]
    if not rows:
        return [*problems, f"{path.name}: no rows"]
    problems += [f"{path.name}: {problem}" for problem in _column_problems(list(rows[0]))]
    for number, row in enumerate(rows, start=2):
        for column, value in row.items():
            if not isinstance(value, float):
                continue
            bound = _bound(column, row)
            if not math.isfinite(value) or value < 0:
                problems.append(f"{path.name}:{number}: {column} is {value}")
            elif value > bound:
                problems.append(f"{path.name}:{number}: {column} is {value}, above its bound {bound:g}")
    return problems


def _bound(column: str, row: Mapping[str, Any]) -> float:
    """The largest value that a column may have.

    A share is at most 1. A share of a peak that was measured may pass 1 by the noise of that peak: `x_spread_ratio`
    beside `x_share` is p80 over p20 of the times that the peak was taken from. A data sheet's peak has no noise.
    """
    if not column.endswith("_share"):
        return math.inf
    return max(1.001, row.get(f"{column.removesuffix('_share')}_spread_ratio") or 1.0)  # 0.001: rounding


def _column_problems(columns: Sequence[str]) -> list[str]:
    missing = [f"column {name!r} is missing" for name in REQUIRED_COLUMNS if name not in columns]
    words = {"case", "variant", "note", "policy", "workload", "phase", *_UNITLESS}
    unitless = [name for name in columns if name not in words and not _UNITS.search(name)]
    return missing + [f"column {name!r} names no unit" for name in unitless]


def _value(text: str | None) -> float | str | None:
    if not text:  # an empty cell, or one that a run which died did not write
        return None
    try:
        return float(text)
    except ValueError:
        return text
