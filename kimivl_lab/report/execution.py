"""Executing a notebook on this machine, once for each state of its sources.

Test: tests/test_report.py, tests/test_refresh.py.
"""

import copy
import datetime
import hashlib
import json
import re
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import nbformat
import torch
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbformat import NotebookNode

from ..datasets import repository_root
from ..measure.provenance import device_name, versions
from .kernel import BACKEND, OwnKernelManager

RUN = "kimivl_lab_run"  # the key in a saved notebook's metadata: what was executed, when, where, how long
_STATE = "kimivl_lab_execution"  # the key in the executed notebook's metadata
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Execution:
    """How one run went. `fingerprint` is of everything the outputs depend on; `error` is empty when all cells ran."""

    fingerprint: str
    date: str
    seconds: float
    error: str


def fingerprint(path: Path) -> str:
    """A hash of all that decides the outputs.

    These are the notebook's cells, the library's sources, the data, the versions, the device, the interpreter, the
    backend of the figures and the number of threads. Saved outputs and the report's own sources do not count.
    """
    root = repository_root()
    cells = [(cell.cell_type, cell.source) for cell in nbformat.read(path, as_version=4).cells]
    kernel = (sys.executable, BACKEND, torch.get_num_threads())
    digest = hashlib.sha256(json.dumps([cells, versions(), device_name(), *kernel]).encode())
    library = (file for file in (root / "kimivl_lab").rglob("*") if file.parent != Path(__file__).parent)
    for file in sorted([*library, *(root / "data").rglob("*")]):
        if file.is_file() and file.suffix != ".pyc":
            digest.update(f"{file.relative_to(root)} {file.stat().st_size}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def code_hash(notebook: NotebookNode) -> str:
    """A hash of the code cells, which tells whether saved outputs belong to the code that stands above them."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256(json.dumps(code).encode()).hexdigest()[:16]


def as_saved(notebook: NotebookNode, execution: Execution) -> NotebookNode:
    """A copy of an executed notebook as it is kept in the repository, with its run in its metadata."""
    saved = copy.deepcopy(notebook)
    saved.metadata.pop(_STATE, None)
    saved.metadata[RUN] = {
        "code": code_hash(saved),
        "date": execution.date,
        "device": device_name(),
        "seconds": execution.seconds,
    }
    return saved


def execute(
    path: Path, key: str, *, timeout: int, on_cell: Callable[[int], object], folder: Path | None = None
) -> tuple[NotebookNode, Execution]:
    """Runs a copy of the notebook in a fresh kernel until its end or its first error.

    Args:
        key: its fingerprint.
        timeout: seconds a cell.
        on_cell: called with each cell's index before it runs.
        folder: where the kernel runs; None is the notebook's folder.
    """
    notebook = nbformat.read(path, as_version=4)
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    current = 0

    def starting(cell: NotebookNode, cell_index: int) -> None:
        nonlocal current
        current = cell_index
        on_cell(cell_index)

    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_manager_class=OwnKernelManager,
        record_timing=False,
        resources={"metadata": {"path": str(folder or path.parent)}},
        on_cell_start=starting,
        extra_arguments=["--IPKernelApp.log_level=40"],
    )
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    start, error = time.perf_counter(), ""
    try:
        client.execute()
    except Exception as failure:  # a failed notebook is a result to show, whatever failed in it
        error = f"cell {current + 1} of {len(notebook.cells)}: {_reason(failure)}"
    execution = Execution(key, date, round(time.perf_counter() - start, 1), error)
    notebook.metadata[_STATE] = asdict(execution)
    return notebook, execution


def saved_execution(saved: Path, key: str) -> tuple[NotebookNode, Execution] | None:
    """The executed notebook at `saved`, if all its cells ran and its fingerprint is still `key`."""
    try:
        notebook = nbformat.read(saved, as_version=4)
        execution = Execution(**notebook.metadata[_STATE])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if execution.error or execution.fingerprint != key:
        return None
    return notebook, execution


def _reason(failure: Exception) -> str:
    """One line: the error that a cell raised, without its traceback."""
    if isinstance(failure, CellExecutionError):
        name, text = failure.ename, _COLOUR.sub("", failure.evalue)
    else:
        name, text = type(failure).__name__, str(failure)
    if isinstance(failure, CellTimeoutError):
        text = text.splitlines()[0]  # the rest repeats the cell
    return textwrap.shorten(f"{name}: {text}", 300)
