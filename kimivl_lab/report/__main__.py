"""`python -m kimivl_lab.report`: executes the notebooks on this machine and writes build/report/index.html."""

import argparse
import fnmatch
import sys
from collections.abc import Sequence
from pathlib import Path

import nbformat
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..datasets import repository_root
from .execution import execute, fingerprint, saved_execution
from .ladder import ladder_picture
from .page import Card, write_index, write_notebook_page


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every cell of every notebook ran, 1 when one failed, 2 when no notebook was asked for."""
    arguments = _parser().parse_args(argv)
    console = Console(highlight=False)
    found = sorted(arguments.notebooks.glob("*.ipynb"))
    paths = [path for path in found if fnmatch.fnmatch(path.stem, arguments.only)]
    if not paths:
        names = ", ".join(path.stem for path in found) or "none"
        console.print(f"no notebook is called {arguments.only!r}; {arguments.notebooks} holds: {names}", style="red")
        return 2
    (arguments.out / "notebooks").mkdir(parents=True, exist_ok=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("cells"))
    quiet = not console.is_terminal
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=quiet) as progress:
        cards = [_run(path, paths, arguments, progress) for path in paths]
    index = write_index(cards, ladder_picture(), arguments.out)
    console.print(f"report: {index}", soft_wrap=True)
    return 1 if any(card.execution.error for card in cards) else 0


def _run(path: Path, paths: list[Path], arguments: argparse.Namespace, progress: Progress) -> Card:
    """One notebook of `paths`: its saved execution when nothing has changed, else a new one; then its page."""
    label = f"{paths.index(path) + 1}/{len(paths)} {path.stem}"
    saved, key = arguments.out / "notebooks" / path.name, fingerprint(path)
    kept = None if arguments.force else saved_execution(saved, key)
    if kept:
        notebook, execution = kept
        outcome = f"cached, measured at {execution.date}"
    else:
        task = progress.add_task(label, total=len(nbformat.read(path, as_version=4).cells))
        notebook, execution = execute(
            path, key, timeout=arguments.timeout, on_cell=lambda index: progress.update(task, completed=index + 1)
        )
        progress.remove_task(task)
        nbformat.write(notebook, saved)
        outcome = f"FAILED, {execution.error}" if execution.error else f"every cell ran, {execution.seconds} s"
    progress.console.print(f"{label}: {outcome}", markup=False, soft_wrap=True)
    names = {path.stem for path in paths}
    return write_notebook_page(path, notebook, execution, cached=kept is not None, names=names, folder=arguments.out)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kimivl_lab.report", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build") / "report", metavar="DIR")
    parser.add_argument("--only", default="*", metavar="GLOB", help="notebooks to show, such as '10_*' (default: all)")
    parser.add_argument("--force", action="store_true", help="execute notebooks that have not changed as well")
    parser.add_argument("--timeout", type=int, default=600, metavar="S", help="seconds a cell may take (default: 600)")
    parser.add_argument("--notebooks", type=Path, default=repository_root() / "notebooks", metavar="DIR")
    return parser


if __name__ == "__main__":
    sys.exit(main())
