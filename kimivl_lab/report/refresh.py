"""`python -m kimivl_lab.report.refresh`: executes the notebooks anew and says what their outputs would change.

Each notebook is built from its text and executed in build/refresh. Its outputs are compared with the committed ones,
and every cell that differs is one line: notebook, cell, class (see `changes`), difference. Without `--accept` no file
of notebooks/ changes, and a semantic change is exit code 1. `--accept` takes the new outputs over. It executes again
only what has changed since the last execution.

Test: tests/test_refresh.py.
"""

import argparse
import fnmatch
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import jupytext
import nbformat
from jupytext.cli import jupytext as convert
from nbformat import NotebookNode

from ..datasets import repository_root
from ..lessons.minutes import machine_minutes
from .changes import CLASSES, Change, changes
from .execution import RUN, as_saved, execute, fingerprint, saved_execution


def main(argv: Sequence[str] | None = None) -> int:
    """0 when nothing semantic changed or all was accepted, 1 when something did or failed, 2 when nothing was asked."""
    arguments = _parser().parse_args(argv)
    texts = arguments.notebooks / "text"
    names = sorted(path.relative_to(texts).with_suffix("") for path in texts.rglob("*.py"))
    chosen = [name for name in names if fnmatch.fnmatch(name.name, arguments.only)]
    if not chosen:
        print(f"no notebook is called {arguments.only!r}; {texts} holds: {', '.join(map(str, names)) or 'none'}")
        return 2
    count, failed = Counter[str](), 0
    for name in chosen:
        lines = _refresh(name, arguments)
        failed += lines is None
        for change in lines or ():
            count[change.kind] += 1
            print(f"{name.name:30s} {change.cell or '':>4} {change.kind:9s} {change.text}", flush=True)
    print(", ".join(f"{count[kind]} {kind}" for kind in CLASSES), f"changes, {failed} notebooks failed")
    if count["semantic"] and not arguments.accept:
        print(f"look at {arguments.out} and at each semantic change; `make notebooks` takes the new outputs over")
    return 1 if failed or (count["semantic"] and not arguments.accept) else 0


def _refresh(name: Path, arguments: argparse.Namespace) -> list[Change] | None:
    """What changed in one notebook, which is taken over if asked for; None if a cell failed: it is then kept apart."""
    target, saved = (folder / name.with_suffix(".ipynb") for folder in (arguments.notebooks, arguments.out))
    built = _build(name, arguments)
    key = fingerprint(built)
    kept = saved_execution(saved, key)
    if kept is None:
        print(f"{name.name}: running", flush=True)
        folder = target.parent
        kept = execute(built, key, timeout=arguments.timeout, on_cell=lambda index: None, folder=folder)
        nbformat.write(kept[0], saved)
    notebook, execution = kept
    if execution.error:
        print(f"{name.name}: FAILED, {execution.error}", flush=True)
        return None
    before, after = committed(target), as_saved(notebook, execution)
    if before is None:
        found = [Change(0, "semantic", "a new notebook")]
    else:
        found = changes(_without_run(before), _without_run(after))
    minutes, said = machine_minutes(execution.seconds), after.metadata.get("kimivl_lab", {}).get("minutes_cpu")
    if said is not None and said not in minutes:
        words = f"it took {execution.seconds:.0f} s: minutes_cpu of the text is {said}, and should be {minutes[-1]}"
        found.append(Change(0, "timing", words))
    if arguments.accept:
        _take_over(after, target, arguments.out)
    return found


def _build(name: Path, arguments: argparse.Namespace) -> Path:
    """The notebook of a text; cells that it has in notebooks/ already keep their ids."""
    text = (arguments.notebooks / "text" / name).with_suffix(".py")
    target, built = ((folder / name).with_suffix(".ipynb") for folder in (arguments.notebooks, arguments.out / "built"))
    built.parent.mkdir(parents=True, exist_ok=True)
    (arguments.out / name).parent.mkdir(parents=True, exist_ok=True)
    built.unlink(missing_ok=True)
    if target.exists():
        shutil.copyfile(target, built)
    convert(["--quiet", "--update", "--to", "ipynb", "--output", str(built), str(text)])
    notebook = nbformat.read(built, as_version=4)
    notebook.metadata = jupytext.read(text).metadata  # --update keeps the old values of keys that it does not know
    notebook.metadata.pop("jupytext", None)
    nbformat.write(notebook, built)
    return built


def committed(path: Path) -> NotebookNode | None:
    """The notebook of the last commit; the file itself where git does not know it; None if there is neither."""
    text = _committed_text(path)
    if text is None and path.exists():
        text = path.read_text("utf-8")
    return None if text is None else nbformat.reads(text, as_version=4)


def _committed_text(path: Path) -> str | None:
    command = ["git", "-C", str(path.parent), "show", f"HEAD:./{path.name}"]
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8")
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def _without_run(notebook: NotebookNode) -> NotebookNode:
    notebook = notebook.copy()
    notebook.metadata = {key: value for key, value in notebook.metadata.items() if key != RUN}
    return notebook


def _take_over(notebook: NotebookNode, target: Path, out: Path) -> None:
    """Writes in one step. The file that was there is kept in `out`/replaced unless it is the committed one."""
    if target.exists() and target.read_text("utf-8") != _committed_text(target):
        replaced = out / "replaced"
        replaced.mkdir(exist_ok=True)
        number = len(list(replaced.glob(f"{target.stem}.*")))
        shutil.copyfile(target, replaced / f"{target.stem}.{number}.ipynb")
    new = target.with_suffix(".new")
    nbformat.write(notebook, new)
    os.replace(new, target)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kimivl_lab.report.refresh", description=__doc__)
    parser.add_argument("--accept", action="store_true", help="write the new outputs into notebooks/")
    parser.add_argument("--only", default="*", metavar="GLOB", help="notebooks to execute, such as '10_*'")
    parser.add_argument("--out", type=Path, default=Path("build") / "refresh", metavar="DIR")
    parser.add_argument("--timeout", type=int, default=600, metavar="S", help="seconds a cell may take (default: 600)")
    parser.add_argument("--notebooks", type=Path, default=repository_root() / "notebooks", metavar="DIR")
    return parser


if __name__ == "__main__":
    sys.exit(main())
